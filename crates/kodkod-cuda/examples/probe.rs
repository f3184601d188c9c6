//! Correctness and speed of the kernels on one GPU: against the CPU engine on small shapes, then times on published ones.
//!
//!     probe compile [N]        fills the kernel cache; no GPU is needed (or only the N-th part)
//!     probe check              small shapes against the CPU
//!     probe time [SHAPE ...]   milliseconds and TFLOP/s

use std::error::Error;
use std::time::Instant;

use half::bf16;
use kodkod_core::{Knobs, Routing, Shape, WeightGradients, Weights};
use kodkod_cpu::{CpuGroup, CpuOptions};
use kodkod_cuda::driver::{Device, Event};
use kodkod_cuda::{CudaLayer, DeviceGradients, DeviceStep, DeviceWeights, jit, new_gradients};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// hidden, intermediate, experts, top-k, tokens, minibatch rows, ring rows, saved rows, ranks
const CHECKS: [([usize; 5], [usize; 3], usize); 10] = [
    ([128, 128, 4, 2, 100], [1024, 2048, Knobs::ALL], 1),
    ([256, 192, 8, 2, 300], [1024, 2048, Knobs::ALL], 1),
    ([512, 320, 8, 3, 777], [1024, 2048, Knobs::ALL], 1),
    ([512, 320, 8, 3, 777], [128, 128, 0], 1),
    ([512, 320, 8, 3, 777], [256, 512, 512], 1),
    ([512, 320, 8, 3, 777], [256, 512, 512], 2),
    ([512, 320, 8, 3, 777], [1024, 2048, Knobs::ALL], 4),
    ([2048, 768, 16, 4, 1000], [2048, 4096, Knobs::ALL], 1),
    ([2880, 1408, 4, 2, 500], [512, 1024, 0], 1),
    ([64, 64, 16, 1, 40], [128, 128, 0], 1),
];
const SHAPES: [(&str, [usize; 4]); 6] = [
    ("olmoe-1b-7b", [2048, 1024, 64, 8]),
    ("qwen3-30b-a3b", [2048, 768, 128, 8]),
    ("qwen3-235b-a22b", [4096, 1536, 128, 8]),
    ("kimi-slice", [7168, 2048, 12, 8]),
    ("deepseek-v3-slice", [7168, 2048, 16, 8]),
    ("mixtral-8x7b", [4096, 14336, 8, 2]),
];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 24) as f32
    }
    /// About normal, of the given deviation.
    fn rows(&mut self, n: usize, deviation: f32) -> Vec<bf16> {
        let mut one = || (self.unit() + self.unit() + self.unit() + self.unit() - 2.0) * 1.732 * deviation;
        (0..n).map(|_| bf16::from_f32(one())).collect()
    }
    fn routes(&mut self, tokens: usize, experts: usize, top_k: usize) -> (Vec<i32>, Vec<f32>) {
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let start = ids.len();
            while ids.len() < start + top_k {
                let id = (self.next() >> 20) as usize % experts;
                if !ids[start..].contains(&(id as i32)) {
                    ids.push(id as i32);
                }
            }
        }
        let weights = (0..tokens * top_k).map(|_| self.unit()).collect();
        (ids, weights)
    }
}

struct Case {
    shape: Shape,
    x: Vec<bf16>,
    dy: Vec<bf16>,
    w: [Vec<bf16>; 3],
    ids: Vec<i32>,
    weights: Vec<f32>,
}

fn case([h, i, e, k, tokens]: [usize; 5]) -> Case {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (sh, si) = ((h as f32).powf(-0.5), (i as f32).powf(-0.5));
    // Weights are drawn once and repeated over experts with a shift, which is quick.
    let mut weight = |s: f32| {
        let one = random.rows(h * i + e * 8, s);
        (0..e).flat_map(|x| one[x * 8..x * 8 + h * i].to_vec()).collect::<Vec<_>>()
    };
    let w = [weight(sh), weight(sh), weight(si)];
    let (x, dy) = (random.rows(tokens * h, 1.0), random.rows(tokens * h, 1.0));
    let (ids, weights) = random.routes(tokens, e, k);
    Case { shape: Shape::new(h, i, e, k), x, dy, w, ids, weights }
}

fn relative(
    name: &str,
    ours: impl Iterator<Item = f32>,
    reference: impl Iterator<Item = f32>,
) -> (String, bool) {
    let (mut error, mut size, mut bad) = (0.0_f64, 0.0_f64, 0);
    for (a, b) in ours.zip(reference) {
        if !a.is_finite() {
            bad += 1;
        } else {
            error += f64::from((a - b).abs());
            size += f64::from(b.abs());
        }
    }
    let ratio = error / size.max(1e-30);
    (
        format!("{name} {ratio:.1e}{}", if bad > 0 { format!(" ({bad} not finite)") } else { String::new() }),
        ratio < 0.01 && bad == 0,
    )
}

struct OnGpu {
    layer: CudaLayer,
    step: DeviceStep,
    weights: DeviceWeights,
    gradients: DeviceGradients,
}

fn on_gpu(device: &std::sync::Arc<Device>, c: &Case, knobs: &Knobs, split: &[usize]) -> Outcome<OnGpu> {
    let gradients = new_gradients(&c.shape)?;
    let layer = CudaLayer::new(device, &c.shape, knobs, split)?;
    for b in [&gradients.gate, &gradients.up, &gradients.down] {
        b.fill(0xff, layer.stream())?;
    }
    let w = Weights { gate: &c.w[0][..], up: &c.w[1], down: &c.w[2], biases: None, shared: None };
    Ok(OnGpu {
        step: DeviceStep::new(&c.shape, &c.x, &c.dy, &c.ids, &c.weights)?,
        weights: DeviceWeights::from_host(&w)?,
        gradients,
        layer,
    })
}

fn check() -> Outcome {
    let device = Device::new(0)?;
    let mut bits: Vec<([usize; 5], u64)> = Vec::new();
    for (dims, [minibatch, ring, saved], ranks) in CHECKS {
        let c = case(dims);
        let knobs = Knobs {
            fwd_comm_sms: 2,
            bwd_comm_sms: 2,
            minibatch_rows: minibatch,
            ring_rows: ring,
            saved_rows: saved,
        };
        let split = Routing::even_split(dims[4], ranks);
        let gpu = on_gpu(&device, &c, &knobs, &split)?;
        gpu.layer.forward(&gpu.step, &gpu.weights)?;
        gpu.layer.finish()?;
        println!("{dims:?} knobs {minibatch} {ring} {saved} ranks {ranks}: forward ran");
        gpu.layer.backward(&gpu.step, &gpu.weights, &gpu.gradients, false)?;
        gpu.layer.finish()?;

        let cpu = CpuGroup::new(CpuOptions::default())?;
        let routing = Routing::new(&c.shape, &c.ids, &c.weights, &[dims[4]])?;
        let w = Weights { gate: &c.w[0][..], up: &c.w[1], down: &c.w[2], biases: None, shared: None };
        let (y, saved) = cpu.forward(&c.shape, &Knobs::for_shape(&c.shape), &c.x, &routing, &w)?;
        let mut g = WeightGradients::zeros(&c.shape);
        let (dx, d_w) = cpu.backward(&saved, &c.dy, &c.x, &w, g.as_mut(), false)?;

        let f = |v: Vec<bf16>| v.into_iter().map(bf16::to_f32).collect::<Vec<_>>();
        let ours = [
            f(gpu.step.y.read()?),
            f(gpu.step.dx.read()?),
            gpu.step.d_topk_weights.read()?,
            gpu.gradients.gate.read()?,
            gpu.gradients.up.read()?,
            gpu.gradients.down.read()?,
        ];
        let reference = [f(y), f(dx), d_w, g.gate, g.up, g.down];
        let names = ["y", "dx", "d_w", "dw_gate", "dw_up", "dw_down"];
        let rows: Vec<_> = (0..6)
            .map(|i| relative(names[i], ours[i].iter().copied(), reference[i].iter().copied()))
            .collect();
        let good = rows.iter().all(|r| r.1);
        let text = rows.into_iter().map(|r| r.0).collect::<Vec<_>>().join(", ");
        let hash = ours.iter().flatten().fold(0xcbf2_9ce4_8422_2325_u64, |h, v| {
            (h ^ u64::from(v.to_bits())).wrapping_mul(0x100_0000_01b3)
        });
        let same = bits.iter().find(|b| b.0 == dims).is_none_or(|b| b.1 == hash);
        bits.push((dims, hash));
        println!(
            "  {} bits {hash:016x} {}: {text}",
            if good { "ok  " } else { "MISS" },
            if same { "same" } else { "OTHER BITS" }
        );
    }
    Ok(())
}

fn time_knobs(shape: &Shape) -> Knobs {
    let given = |name| std::env::var(name).ok().and_then(|v| v.parse::<usize>().ok());
    let defaults = Knobs::for_shape(shape).with_rows(given("MB"), given("RING"), given("SAVED"));
    let comm = given("COMM").unwrap_or(4);
    Knobs { fwd_comm_sms: comm, bwd_comm_sms: given("BCOMM").unwrap_or(comm), ..defaults }
}

fn time(names: &[String]) -> Outcome {
    let device = Device::new(0)?;
    println!("{} with {} SMs", device.name(), device.sms());
    let tokens = 8192;
    for (name, [h, i, e, k]) in SHAPES {
        if !names.is_empty() && !names.iter().any(|n| n == name) {
            continue;
        }
        let c = case([h, i, e, k, tokens]);
        let start = Instant::now();
        let gpu = on_gpu(&device, &c, &time_knobs(&c.shape), &[tokens])?;
        let setup = start.elapsed();
        let stream = gpu.layer.stream();
        let run = |what: &dyn Fn() -> Outcome| -> Outcome<f32> {
            let mut all = Vec::new();
            for n in 0..13 {
                let (a, b) = (Event::new()?, Event::new()?);
                a.record(stream)?;
                what()?;
                b.record(stream)?;
                let ms = a.milliseconds_to(&b)?;
                gpu.layer.finish()?;
                if n >= 3 {
                    all.push(ms);
                }
            }
            all.sort_by(f32::total_cmp);
            Ok(all[all.len() / 2])
        };
        let schedule = run(&|| Ok(gpu.layer.schedule(&gpu.step)?))?;
        let forward = run(&|| Ok(gpu.layer.forward(&gpu.step, &gpu.weights)?))?;
        let both = run(&|| {
            gpu.layer.forward(&gpu.step, &gpu.weights)?;
            Ok(gpu.layer.backward(&gpu.step, &gpu.weights, &gpu.gradients, false)?)
        })?;
        let flops = c.shape.forward_flops(tokens, tokens * k);
        println!(
            "{name}: schedule {schedule:.3} ms, forward {forward:.3} ms {:.0} TFLOP/s, both {both:.3} ms {:.0} TFLOP/s (setup {:.1} s)",
            flops / f64::from(forward) / 1e9,
            3.0 * flops / f64::from(both) / 1e9,
            setup.as_secs_f32()
        );
    }
    Ok(())
}

fn compile(shard: Option<usize>) -> Outcome {
    let mut all: Vec<(Shape, Knobs, Vec<usize>)> = CHECKS
        .iter()
        .map(|&(d, [minibatch, ring, saved], ranks)| {
            let knobs = Knobs {
                fwd_comm_sms: 2,
                bwd_comm_sms: 2,
                minibatch_rows: minibatch,
                ring_rows: ring,
                saved_rows: saved,
            };
            (Shape::new(d[0], d[1], d[2], d[3]), knobs, Routing::even_split(d[4], ranks))
        })
        .collect();
    all.extend(SHAPES.iter().map(|&(_, [h, i, e, k])| {
        let shape = Shape::new(h, i, e, k);
        let knobs = time_knobs(&shape);
        (shape, knobs, vec![8192])
    }));
    for (index, (shape, knobs, tokens)) in all.into_iter().enumerate() {
        if shard.is_some_and(|s| s != index) {
            continue;
        }
        let defines = CudaLayer::defines(&shape, &knobs, &tokens)?;
        for source in jit::Source::ALL {
            let cubin = jit::cubin(source, &defines)?;
            for line in cubin.log.lines().filter(|l| l.contains("spill") || l.contains("Perf")) {
                println!("{source:?} {}x{}: {line}", shape.hidden, shape.intermediate);
            }
        }
    }
    Ok(())
}

fn main() -> Outcome {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("compile") => compile(arguments.get(1).map(|n| n.parse()).transpose()?),
        Some("check") => check(),
        Some("time") => time(&arguments[1..]),
        _ => Err("compile, check or time".into()),
    }
}
