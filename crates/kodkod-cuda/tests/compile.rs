//! The kernels compile for sm_90a, without a GPU: in the variants below, and within the registers and spills that are
//! planned. NVRTC comes from its wheel (`pip install nvidia-cuda-nvrtc==13.0.88`), which `KODKOD_NVRTC` names.
//!
//! Where there is no NVRTC the test says so and passes, unless `KODKOD_REQUIRE_NVRTC` is set: continuous integration sets
//! it.

use std::sync::Mutex;
use std::time::Instant;

use kodkod_core::{Activation, Knobs, Precision, Shape, Shared};
use kodkod_cuda::jit::{self, Source};
use kodkod_cuda::{CudaLayer, Error};

/// What a kernel may take: 65536 registers over 384 threads, in steps of 8; 65536 over 1024 for the others.
const PASS_REGISTERS: u32 = 168;
const SCHEDULE_REGISTERS: u32 = 64;

/// Bytes of stores and of loads that a thread may spill: what the kernels do today in the worst variant, so that it does
/// not grow unseen. Lower it where a kernel gets better.
fn spills_allowed(job: &Job) -> (u32, u32) {
    match (job.source, job.gradients, job.traced) {
        (Source::Schedule | Source::Meet | Source::Links, ..) => (0, 0),
        (Source::Forward | Source::Backward, _, true) => (24, 24),
        (Source::Forward, ..) | (Source::Backward, Precision::F32, _) => (20, 20),
        (Source::Backward, Precision::Bf16, _) => (72, 72),
    }
}

/// One file to compile.
struct Job {
    name: String,
    source: Source,
    gradients: Precision,
    traced: bool,
    defines: Vec<(&'static str, String)>,
}

/// Every option of a layer at once, over two ranks, with replay; and the shapes that are timed.
fn variants() -> Vec<(&'static str, Shape, Knobs, Vec<usize>)> {
    let mut everything = Shape::new(192, 320, 8, 3);
    everything.activation = Activation::SwiGluOai { alpha: 1.702, limit: Some(7.0) };
    everything.biases = true;
    everything.shared = Some(Shared { intermediate: 128, output_gate: true });
    let replayed = Knobs::for_shape(&everything).with_rows(Some(128), Some(256), Some(0));
    let timed = [
        ("olmoe-1b-7b", Shape::new(2048, 1024, 64, 8)),
        ("qwen3-30b-a3b", Shape::new(2048, 768, 128, 8)),
        ("qwen3-235b-a22b", Shape::new(4096, 1536, 128, 8)),
        ("kimi-slice", Shape::new(7168, 2048, 12, 8)),
        ("deepseek-v3-slice", Shape::new(7168, 2048, 16, 8)),
        ("mixtral-8x7b", Shape::new(4096, 14336, 8, 2)),
    ];
    let timed = timed.map(|(name, shape)| (name, shape.clone(), Knobs::for_shape(&shape), vec![8192]));
    [("everything", everything, replayed, vec![300, 77])].into_iter().chain(timed).collect()
}

/// Every variant with gradients in f32 and in bf16, which only the backward depends on; one with stamps.
fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for (name, shape, knobs, tokens) in variants() {
        let mut add = |gradients, traced: bool, sources: &[Source]| {
            let mut defines =
                CudaLayer::defines(&shape, &knobs, &tokens, gradients).expect("the variants are allowed");
            if traced {
                defines.push(("TRACE", "1".into())); // As in `CudaLayer::traced`.
            }
            let name = format!("{name}, {gradients}{}", if traced { ", traced" } else { "" });
            jobs.extend(sources.iter().map(|&source| Job {
                name: name.clone(),
                source,
                gradients,
                traced,
                defines: defines.clone(),
            }));
        };
        add(Precision::F32, false, &Source::ALL);
        add(Precision::Bf16, false, &[Source::Backward]);
        if name == "everything" {
            add(Precision::F32, false, &[Source::Meet]);
            add(Precision::Bf16, true, &[Source::Forward, Source::Backward]);
        }
    }
    jobs.push(Job {
        name: "links".into(),
        source: Source::Links,
        gradients: Precision::F32,
        traced: false,
        defines: Vec::new(),
    });
    jobs
}

/// What ptxas says of one kernel.
#[derive(Debug, Default, Clone)]
struct Usage {
    kernel: String,
    registers: u32,
    spill_stores: u32,
    spill_loads: u32,
}

/// ptxas names a kernel, then its spills, then its registers.
fn usages(log: &str) -> Vec<Usage> {
    let number_before = |line: &str, words: &str| -> Option<u32> {
        line[..line.find(words)?].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let mut all = Vec::new();
    let mut now = Usage::default();
    for line in log.lines() {
        if line.contains("Compiling entry function") {
            now =
                Usage { kernel: line.split('\'').nth(1).unwrap_or_default().to_owned(), ..Usage::default() };
        }
        if let Some(bytes) = number_before(line, "bytes spill stores") {
            now.spill_stores = bytes;
            now.spill_loads = number_before(line, "bytes spill loads").unwrap_or(u32::MAX);
        }
        // `Used 168 registers`
        if let Some(registers) = line.find("Used ").and_then(|at| number_before(&line[at..], " registers")) {
            now.registers = registers;
            all.push(now.clone());
        }
    }
    all
}

#[test]
fn kernels_compile_within_their_registers() {
    let required = std::env::var_os("KODKOD_REQUIRE_NVRTC").is_some();
    let jobs = jobs();
    let (total, next) = (jobs.len(), Mutex::new(jobs.into_iter()));
    let misses = Mutex::new(Vec::new());
    let compiled = Mutex::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(total) {
            scope.spawn(|| {
                loop {
                    let Some(job) = next.lock().expect("no panic holds it").next() else {
                        return;
                    };
                    let Job { name, source, defines, .. } = &job;
                    let (start, miss) = (Instant::now(), |text| misses.lock().expect("as above").push(text));
                    let cubin = match jit::compile(*source, defines) {
                        Ok(cubin) => cubin,
                        Err(error @ Error::NoNvrtc { .. }) if !required => {
                            println!("NOT RUN: {source:?} of {name}: {error}");
                            continue;
                        }
                        Err(error) => return miss(format!("{source:?} of {name}: {error}")),
                    };
                    *compiled.lock().expect("as above") += 1;
                    let seconds = start.elapsed().as_secs_f32();
                    let usages = usages(&cubin.log);
                    if usages.is_empty() {
                        miss(format!("{source:?} of {name}: no line of registers in the log:\n{}", cubin.log));
                    }
                    let registers = match source {
                        // Some of its kernels have 1024 threads, as the schedule's.
                        Source::Schedule | Source::Meet | Source::Links => SCHEDULE_REGISTERS,
                        Source::Forward | Source::Backward => PASS_REGISTERS,
                    };
                    let (stores, loads) = spills_allowed(&job);
                    for u in usages {
                        println!(
                            "{name}: {} takes {} registers (allowed {registers}), spills {} + {} bytes (allowed {stores} + \
                             {loads}); the file took {seconds:.1} s, {} bytes",
                            u.kernel, u.registers, u.spill_stores, u.spill_loads, cubin.code.len()
                        );
                        if u.registers > registers || u.spill_stores > stores || u.spill_loads > loads {
                            miss(format!("{name}: {u:?}: {registers} registers, {stores} and {loads} bytes are allowed"));
                        }
                    }
                    for line in cubin.log.lines().filter(|l| l.contains("wgmma") || l.contains("warning")) {
                        println!("{name}, {source:?}: {line}");
                    }
                }
            });
        }
    });
    let misses = misses.into_inner().expect("as above");
    println!("{} of {total} files compiled", compiled.into_inner().expect("as above"));
    assert!(misses.is_empty(), "{}", misses.join("\n"));
}

#[test]
fn more_experts_than_the_schedule_takes_are_refused() {
    let defines = |experts| {
        let shape = Shape::new(64, 64, experts, 1);
        CudaLayer::defines(&shape, &Knobs::for_gpu(&shape), &[8, 8], Precision::F32)
    };
    let error = defines(2048).expect_err("too many").to_string();
    println!("{error}");
    assert!(error.contains("experts") && error.contains("2048") && error.contains("1023"), "{error}");
    assert!(defines(512).is_ok());
}
