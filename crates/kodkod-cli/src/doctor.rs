//! `kodkod doctor`: what this machine offers, what kodkod will use, and whether it computes right here.

use std::process::ExitCode;

use kodkod::cuda::{self, driver, jit};
use kodkod::{CpuOptions, Element, ExpertGroup, Isa, Knobs, ROW_BLOCK, Shape, Shared, bf16};
use serde::Serialize;

use crate::bench::Dense;
use crate::inputs::random_step;
use crate::options::{Device, MachineOptions};
use crate::step::Step;

/// Options of `kodkod doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    cpu: String,
    cores: usize,
    memory_bytes: Option<u64>,
    available_memory_bytes: Option<u64>,
    instruction_sets: Vec<Level>,
    device: String,
    threads: usize,
    isa: String,
    cuda: Cuda,
    self_test: Vec<Check>,
    ok: bool,
}

/// What there is for `--device cuda`.
#[derive(Debug, Serialize)]
struct Cuda {
    driver: bool,
    gpus: Vec<Gpu>,
    /// The first GPU that cannot be used, and why; or why there is none.
    error: Option<String>,
    /// The compiler's library; None where there is none, and `nvrtc_error` says where it was looked for.
    nvrtc: Option<std::path::PathBuf>,
    nvrtc_error: Option<String>,
    cache: std::path::PathBuf,
}

#[derive(Debug, Serialize)]
struct Gpu {
    ordinal: usize,
    name: String,
    sms: u32,
    capability: String,
}

impl Cuda {
    fn look() -> Self {
        let (mut gpus, mut error, mut driver) = (Vec::new(), None, true);
        loop {
            match driver::Device::new(gpus.len()) {
                Ok(gpu) => gpus.push(Gpu {
                    ordinal: gpus.len(),
                    name: gpu.name().to_owned(),
                    sms: gpu.sms(),
                    capability: format!("{}.{}", gpu.capability().0, gpu.capability().1),
                }),
                Err(cuda::Error::NoDevice { .. }) if !gpus.is_empty() => break,
                Err(e) => {
                    driver = !matches!(e, cuda::Error::NoDriver);
                    error = Some(e.to_string());
                    break;
                }
            }
        }
        let (nvrtc, nvrtc_error) = match jit::nvrtc() {
            Ok(path) => (Some(path), None),
            Err(e) => (None, Some(e.to_string())),
        };
        Cuda { driver, gpus, error, nvrtc, nvrtc_error, cache: jit::cache_dir() }
    }

    fn print(&self) {
        println!("  CUDA driver        {}", if self.driver { "found" } else { "not found" });
        for gpu in &self.gpus {
            println!(
                "  GPU {}              {}, {} SMs, compute capability {}",
                gpu.ordinal, gpu.name, gpu.sms, gpu.capability
            );
        }
        self.error.iter().for_each(|error| println!("                     {error}"));
        match &self.nvrtc {
            Some(path) => println!("  NVRTC              {}", path.display()),
            None => println!("  NVRTC              {}", self.nvrtc_error.as_deref().unwrap_or("not found")),
        }
        println!("  kernel cache       {}", self.cache.display());
    }
}

/// An instruction set and the rate of its bf16 GEMM on all threads.
#[derive(Debug, Serialize)]
struct Level {
    name: String,
    dense_size: usize,
    dense_tflops: f64,
}

#[derive(Debug, Serialize)]
struct Check {
    name: String,
    /// None: it passed.
    miss: Option<String>,
}

/// Runs it.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let cpu = MachineOptions { device: Device::Cpu, ..args.machine.clone() }.group(1)?;
    let self_test = self_test(&args.machine)?;
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        cpu: cpu_model().unwrap_or_else(|| format!("unknown ({})", std::env::consts::ARCH)),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: meminfo("MemTotal"),
        available_memory_bytes: available_memory(),
        instruction_sets: Isa::available().into_iter().map(|isa| level(isa, cpu.threads())).collect(),
        device: args.machine.device.to_string(),
        threads: cpu.threads(),
        isa: cpu.isa().map_or_else(String::new, |isa| isa.to_string()),
        cuda: Cuda::look(),
        ok: self_test.iter().all(|check| check.miss.is_none()),
        self_test,
    };
    match args.json {
        true => println!("{}", serde_json::to_string(&report)?),
        false => print(&report),
    }
    Ok(ExitCode::from(u8::from(!report.ok)))
}

fn print(report: &Report) {
    let gb = |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| format!("{:.1} GB", b as f64 / 1e9));
    println!("kodkod {}\n\nThis machine", report.version);
    println!("  CPU                {}", report.cpu);
    println!("  cores              {}", report.cores);
    println!(
        "  memory             {}, {} available",
        gb(report.memory_bytes),
        gb(report.available_memory_bytes)
    );
    println!("  instruction sets   all give the same bits; bf16 GEMM on {} threads:", report.threads);
    for level in &report.instruction_sets {
        let n = level.dense_size;
        println!("    {:<16} {:7.1} GFLOP/s ({n} x {n} x {n})", level.name, 1e3 * level.dense_tflops);
    }
    report.cuda.print();
    println!("\nkodkod will use");
    println!("  device             {}", report.device);
    println!("  threads            {}", report.threads);
    println!("  instruction set    {}", report.isa);
    println!("\nSelf-test");
    for check in &report.self_test {
        println!("  {}  {}", if check.miss.is_none() { "ok    " } else { "FAILED" }, check.name);
        check.miss.iter().for_each(|miss| println!("          {miss}"));
    }
}

/// A small layer: against the reference in each precision, and bit against bit over ranks and instruction sets.
fn self_test(machine: &MachineOptions) -> anyhow::Result<Vec<Check>> {
    let on_cpu = machine.device == Device::Cpu;
    let [intermediate, shared] = if on_cpu { [48, 32] } else { [64, 64] };
    let mut shape = Shape::new(64, intermediate, 8, 2);
    shape.shared = Some(Shared { intermediate: shared, output_gate: true });
    let tokens = 300;
    let knobs = Knobs::for_shape(&shape).with_rows(Some(ROW_BLOCK), Some(ROW_BLOCK), Some(0));
    let step: Step<bf16> = random_step(&shape, tokens, true, 7);
    let mut checks = vec![against_reference("bf16", &step, machine, knobs)?];
    if on_cpu {
        checks.push(against_reference("f32", &step.convert::<f32>(), machine, knobs)?);
    }
    let one = step.run(&machine.group(1)?, knobs, &[tokens])?;
    let two = step.run(&machine.group(2)?, knobs, &[tokens - 120, 120])?;
    checks.push(Check { name: "2 ranks give the bits of 1".into(), miss: two.first_difference(&one) });
    let Some(used) = machine.group(1)?.isa() else {
        return Ok(checks);
    };
    for isa in Isa::available().into_iter().filter(|isa| isa.to_string() != used.to_string()) {
        let group = ExpertGroup::cpu_with(CpuOptions {
            ranks: 1,
            threads: machine.threads.unwrap_or(0),
            isa: Some(isa),
            ..CpuOptions::default()
        })?;
        let other = step.run(&group, knobs, &[tokens])?;
        let name = format!("{isa} gives the bits of {used}");
        checks.push(Check { name, miss: other.first_difference(&one) });
    }
    Ok(checks)
}

fn against_reference<T: Element>(
    precision: &str,
    step: &Step<T>,
    machine: &MachineOptions,
    knobs: Knobs,
) -> anyhow::Result<Check> {
    let outputs = step.run(&machine.group(2)?, knobs, &[100, step.tokens() - 100])?;
    let comparisons = outputs.compare(&step.reference()?);
    let worst = comparisons.iter().map(|c| c.error).fold(0.0, f64::max);
    let misses: Vec<_> = comparisons.into_iter().filter_map(|c| c.miss).collect();
    let name =
        format!("{precision} against the f64 reference: at most {worst:.1e} of any output's sum is off");
    Ok(Check { name, miss: (!misses.is_empty()).then(|| misses.join("; ")) })
}

/// A size that takes well under a second, and the best of a few products.
fn level(isa: Isa, threads: usize) -> Level {
    let mut n = 256;
    let mut seconds = Dense::<bf16>::new(isa, threads, n).seconds();
    while seconds < 0.02 && n < 2048 {
        n *= 2;
        let mut dense = Dense::<bf16>::new(isa, threads, n);
        seconds = (0..3).map(|_| dense.seconds()).fold(f64::INFINITY, f64::min);
    }
    Level { name: isa.to_string(), dense_size: n, dense_tflops: 2.0 * (n as f64).powi(3) / seconds / 1e12 }
}

/// The CPU's name, where Linux says it.
fn cpu_model() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().into())
}

/// Bytes that a program may take now, where Linux says it.
pub(crate) fn available_memory() -> Option<u64> {
    meminfo("MemAvailable")
}

/// A line of /proc/meminfo, in bytes.
fn meminfo(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(&format!("{name}:")))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}
