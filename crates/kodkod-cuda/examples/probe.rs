//! Correctness and speed of the kernels on one GPU: against the CPU engine on small shapes, then times on published ones.
//!
//!     probe compile [N]           fills the kernel cache; no GPU is needed (or only part N of 16)
//!     probe check                 small shapes against the CPU, and the same bits over ranks and knobs
//!     probe stall                 a task that hangs: an error that names the rank, and the next pass works
//!     probe graph                 a captured pass, replayed with other inputs and routes
//!     probe once [RANKS]          a tiny layer with everything, once: for compute-sanitizer
//!     probe cold SHAPE            from nothing to the end of a first forward and backward
//!     probe time [SHAPE ...]      milliseconds and TFLOP/s; gradients in bf16 where GRADIENTS=bf16

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::bf16;
use kodkod_core::{
    Activation, Biases, GradientElement, Knobs, Precision, Routing, Shape, Shared, SharedWeights,
    WeightGradients, Weights,
};
use kodkod_cpu::{CpuGroup, CpuOptions};
use kodkod_cuda::driver::{Buffer, Device, Event};
use kodkod_cuda::{
    CudaLayer, DeviceGradients, DeviceStep, DeviceWeights, Hang, Part, jit, new_gradients, read_gradients,
};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;
/// Results with their names.
type Named = Vec<(&'static str, Vec<f32>)>;

/// minibatch rows, ring rows, saved rows
type Rows = [usize; 3];
const PLAIN: Rows = [1024, 2048, Knobs::ALL];

/// A small layer, its tokens, and the ways it is run: all of a check's ways must give the same bits.
struct Check {
    name: &'static str,
    shape: Shape,
    /// Deviation of x.
    scale: f32,
    tokens: usize,
    routes: &'static [Routes],
    ways: Vec<(Rows, Vec<usize>)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Routes {
    /// Distinct experts.
    Distinct,
    /// Some -1 or beyond all experts, some experts twice in a token, some weights 0 or negative; the last expert has no rows.
    Holes,
    /// All to expert 1.
    One,
    /// All -1.
    Nowhere,
}

fn checks() -> Vec<Check> {
    let even = Routing::even_split;
    let check = |name, shape, tokens, ways| {
        let routes = &[Routes::Distinct][..];
        Check { name, shape, scale: 1.0, tokens, routes, ways }
    };
    let plain = |[h, i, e, k, tokens]: [usize; 5], ways: &[(Rows, usize)]| {
        let ways = ways.iter().map(|&(rows, ranks)| (rows, even(tokens, ranks))).collect();
        check("plain", Shape::new(h, i, e, k), tokens, ways)
    };
    let mut gpt_oss = Shape::new(256, 192, 8, 3);
    gpt_oss.biases = true;
    gpt_oss.activation = Activation::SwiGluOai { alpha: 1.702, limit: Some(7.0) };
    let mut clamp = Shape::new(128, 128, 4, 2);
    clamp.activation = Activation::SwiGlu { limit: Some(1.2345) };
    let mut shared = Shape::new(320, 192, 8, 2);
    shared.shared = Some(Shared { intermediate: 448, output_gate: false });
    let mut all = Shape::new(192, 320, 8, 3);
    all.biases = true;
    all.shared = Some(Shared { intermediate: 128, output_gate: true });
    use Routes::{Distinct, Holes, Nowhere, One};
    let every = &[Distinct, Holes, One, Nowhere][..];
    vec![
        plain([128, 128, 4, 2, 100], &[(PLAIN, 1)]),
        plain([256, 192, 8, 2, 300], &[(PLAIN, 1)]),
        plain(
            [512, 320, 8, 3, 777],
            &[(PLAIN, 1), ([128, 128, 0], 1), ([256, 512, 512], 1), ([256, 512, 512], 2), (PLAIN, 4)],
        ),
        plain([2048, 768, 16, 4, 1000], &[([2048, 4096, Knobs::ALL], 1)]),
        plain([2880, 1408, 4, 2, 500], &[([512, 1024, 0], 1)]),
        plain([64, 64, 16, 1, 40], &[([128, 128, 0], 1)]),
        plain([128, 128, 16, 10, 64], &[(PLAIN, 1)]),
        Check {
            scale: 4.0,
            routes: &[Distinct, Holes],
            ..check(
                "biases, gpt-oss",
                gpt_oss,
                300,
                vec![
                    (PLAIN, vec![300]),
                    ([128, 128, 0], vec![300]),
                    ([256, 512, 256], vec![150, 150]),
                    ([128, 256, 0], vec![0, 100, 77, 123]),
                ],
            )
        },
        Check { scale: 3.0, ..check("clamp", clamp, 200, vec![(PLAIN, vec![200])]) },
        Check {
            routes: &[Distinct, Holes],
            ..check(
                "shared",
                shared,
                523,
                vec![
                    (PLAIN, vec![523]),
                    ([256, 256, 0], vec![261, 262]),
                    ([128, 256, 256], vec![0, 12, 12, 499]),
                ],
            )
        },
        Check {
            routes: every,
            ..check(
                "biases, shared, output gate",
                all.clone(),
                333,
                vec![
                    (PLAIN, vec![333]),
                    ([128, 128, 0], vec![333]),
                    ([256, 512, 256], vec![1, 332]),
                    ([128, 128, 0], vec![0, 12, 12, 309]),
                ],
            )
        },
        check("no tokens", all.clone(), 0, vec![(PLAIN, vec![0]), (PLAIN, vec![0, 0])]),
        check("one token", all, 1, vec![(PLAIN, vec![1]), (PLAIN, vec![0, 0, 1, 0])]),
    ]
}

fn check_knobs([minibatch_rows, ring_rows, saved_rows]: Rows) -> Knobs {
    Knobs { fwd_comm_sms: 2, bwd_comm_sms: 2, minibatch_rows, ring_rows, saved_rows }
}

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
    fn values(&mut self, n: usize, deviation: f32) -> Vec<f32> {
        self.rows(n, deviation).into_iter().map(bf16::to_f32).collect()
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 20) as usize % n
    }
    fn routes(&mut self, tokens: usize, experts: usize, top_k: usize, kind: Routes) -> (Vec<i32>, Vec<f32>) {
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let start = ids.len();
            while ids.len() < start + top_k {
                let id = match kind {
                    Routes::Distinct => self.below(experts) as i32,
                    Routes::Holes => match self.below(experts) as i32 - 1 {
                        -1 if self.unit() < 0.5 => experts as i32 + 7,
                        id => id,
                    },
                    Routes::One => 1,
                    Routes::Nowhere => -1,
                };
                if kind != Routes::Distinct || !ids[start..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        let mut weight = || match (kind, self.unit()) {
            (Routes::Holes, w) if w < 0.1 => 0.0,
            (Routes::Holes, w) => w - 0.3,
            (_, w) => w,
        };
        let weights = (0..tokens * top_k).map(|_| weight()).collect();
        (ids, weights)
    }
}

struct Case {
    shape: Shape,
    x: Vec<bf16>,
    dy: Vec<bf16>,
    w: [Vec<bf16>; 3],
    biases: Option<[Vec<f32>; 3]>,
    shared: Option<SharedWeights<Vec<bf16>, Vec<f32>>>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Case {
    fn weights(&self) -> Weights<'_, bf16> {
        Weights {
            gate: &self.w[0],
            up: &self.w[1],
            down: &self.w[2],
            biases: self.biases.as_ref().map(|b| Biases { gate: &b[0][..], up: &b[1], down: &b[2] }),
            shared: self.shared.as_ref().map(|s| SharedWeights {
                gate: &s.gate[..],
                up: &s.up,
                down: &s.down,
                output_gate: s.output_gate.as_deref(),
            }),
        }
    }
}

fn case(shape: &Shape, tokens: usize, routes: Routes, scale: f32) -> Case {
    let (h, i, e) = (shape.hidden, shape.intermediate, shape.experts);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (sh, si) = ((h as f32).powf(-0.5), (i as f32).powf(-0.5));
    // Weights are drawn once and repeated over experts with a shift, which is quick.
    let mut weight = |s: f32| {
        let one = random.rows(h * i + e * 8, s);
        (0..e).flat_map(|x| one[x * 8..x * 8 + h * i].to_vec()).collect::<Vec<_>>()
    };
    let w = [weight(sh), weight(sh), weight(si)];
    let biases = shape.biases.then(|| [i, i, h].map(|n| random.values(e * n, 0.5)));
    let shared = shape.shared.map(|s| {
        let (n, ss) = (h * s.intermediate, (s.intermediate as f32).powf(-0.5));
        let [gate, up, down] = [sh, sh, ss].map(|s| random.rows(n, s));
        let output_gate = s.output_gate.then(|| random.values(h, sh));
        SharedWeights { gate, up, down, output_gate }
    });
    let (x, dy) = (random.rows(tokens * h, scale), random.rows(tokens * h, 1.0));
    let (ids, weights) = random.routes(tokens, e, shape.top_k, routes);
    Case { shape: shape.clone(), x, dy, w, biases, shared, ids, weights }
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

struct OnGpu<T = f32> {
    layer: CudaLayer,
    steps: Vec<DeviceStep>,
    weights: Vec<DeviceWeights>,
    gradients: Vec<DeviceGradients<T>>,
}

/// The GPUs of `$DEVICES`, such as 0,1, or 0,0 for ranks that meet on one; 0 alone where there are not as many as ranks.
fn devices(ranks: usize) -> Outcome<Vec<Arc<Device>>> {
    let given = std::env::var("DEVICES").unwrap_or_default();
    let ordinals = given.split(',').filter_map(|n| n.parse().ok()).collect::<Vec<usize>>();
    let ordinals = if ordinals.len() == ranks { ordinals } else { vec![0] };
    Ok(ordinals.into_iter().map(Device::new).collect::<kodkod_cuda::Result<_>>()?)
}

fn on_gpu<T: GradientElement>(c: &Case, knobs: &Knobs, split: &[usize]) -> Outcome<OnGpu<T>> {
    let devices = devices(split.len())?;
    let parts = Part::all(&devices, &c.shape, split);
    let layer = CudaLayer::new(&devices, &c.shape, knobs, split, T::PRECISION)?;
    let step = |part: &Part| part.step(&c.x, &c.dy, &c.ids, &c.weights);
    let steps = parts.iter().map(step).collect::<kodkod_cuda::Result<_>>()?;
    let weights = parts.iter().map(|part| part.weights(&c.weights())).collect::<kodkod_cuda::Result<_>>()?;
    let gradients = parts.iter().map(Part::new_gradients).collect::<kodkod_cuda::Result<_>>()?;
    devices[0].make_current()?;
    Ok(OnGpu { layer, steps, weights, gradients })
}

impl<T: GradientElement> OnGpu<T> {
    /// Everything that a forward and a backward leave, with its names; buffers hold NaN before.
    fn outcome(&self, run: impl Fn() -> Outcome) -> Outcome<Named> {
        let stream = self.layer.stream();
        self.layer.poison()?;
        for (step, gradients) in self.steps.iter().zip(&self.gradients) {
            step.y.fill(0xff, stream)?;
            step.dx.fill(0xff, stream)?;
            step.d_topk_weights.fill(0xff, stream)?;
            let fill = |values: &Buffer<f32>| values.fill(0xff, stream);
            gradients.as_ref().try_map(|values| values.fill(0xff, stream), fill)?;
        }
        stream.synchronize()?;
        run()?;
        self.read()
    }

    fn read(&self) -> Outcome<Named> {
        let floats = |v: Vec<bf16>| v.into_iter().map(bf16::to_f32).collect::<Vec<_>>();
        let (mut y, mut dx, mut d_w) = (Vec::new(), Vec::new(), Vec::new());
        for step in &self.steps {
            y.extend(floats(step.y.read()?));
            dx.extend(floats(step.dx.read()?));
            d_w.extend(step.d_topk_weights.read()?);
        }
        let mut all = vec![("y", y), ("dx", dx), ("d_w", d_w)];
        let widen =
            |v: Vec<T>| Ok::<_, std::convert::Infallible>(v.into_iter().map(T::to_f32).collect::<Vec<_>>());
        let mut gradients: Named = Vec::new();
        for part in &self.gradients {
            let Ok(part) = read_gradients(part)?.try_map(widen, Ok);
            let part = part.named().into_iter().map(|(name, v)| (name, v.to_vec())).collect::<Named>();
            if gradients.is_empty() {
                gradients = part;
                continue;
            }
            // Of the shared experts, the first part's are all.
            let routed = |name: &str| name.starts_with("dw_") || name.starts_with("db_");
            for ((_, all), (_, more)) in gradients.iter_mut().zip(part).filter(|(g, _)| routed(g.0)) {
                all.extend(more);
            }
        }
        all.extend(gradients);
        Ok(all)
    }

    fn forward(&self) -> Outcome {
        Ok(self.layer.forward_on(&self.steps, &self.weights)?)
    }

    fn backward(&self, accumulate: bool) -> Outcome {
        Ok(self.layer.backward_on(&self.steps, &self.weights, &self.gradients, accumulate)?)
    }

    fn passes(&self, accumulate: bool) -> Outcome {
        self.forward()?;
        self.backward(accumulate)?;
        Ok(self.layer.finish()?)
    }
}

fn hash(all: &Named) -> u64 {
    all.iter()
        .flat_map(|(_, v)| v)
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, v| (h ^ u64::from(v.to_bits())).wrapping_mul(0x100_0000_01b3))
}

/// What the CPU computes, and each gradient's experts without rows.
fn on_cpu(c: &Case, tokens: usize) -> Outcome<Named> {
    let cpu = CpuGroup::new(CpuOptions::default())?;
    let ids: Vec<_> = c.ids.iter().map(|&id| if id < c.shape.experts as i32 { id } else { -1 }).collect();
    let routing = Routing::new(&c.shape, &ids, &c.weights, &[tokens])?;
    let w = c.weights();
    let (y, saved) = cpu.forward(&c.shape, &Knobs::for_shape(&c.shape), &c.x, &routing, &w)?;
    let mut g = WeightGradients::zeros(&c.shape);
    let (dx, d_w) = cpu.backward(&saved, &c.dy, &c.x, &w, g.as_mut(), false)?;
    let floats = |v: Vec<bf16>| v.into_iter().map(bf16::to_f32).collect::<Vec<_>>();
    let mut all = vec![("y", floats(y)), ("dx", floats(dx)), ("d_w", d_w)];
    all.extend(g.named().into_iter().map(|(name, v)| (name, v.to_vec())));
    Ok(all)
}

fn check() -> Outcome {
    let (mut bad, mut runs) = (0, 0);
    for check in checks() {
        for &routes in check.routes {
            let c = case(&check.shape, check.tokens, routes, check.scale);
            let reference = on_cpu(&c, check.tokens)?;
            let mut bits = None;
            let s = &check.shape;
            println!(
                "{} {}x{} experts {} top-k {} tokens {} routes {routes:?}",
                check.name, s.hidden, s.intermediate, s.experts, s.top_k, check.tokens
            );
            for (rows, split) in &check.ways {
                let gpu: OnGpu = on_gpu(&c, &check_knobs(*rows), split)?;
                let ours = gpu.outcome(|| gpu.passes(false))?;
                let compared: Vec<_> = ours
                    .iter()
                    .zip(&reference)
                    .map(|(a, b)| relative(a.0, a.1.iter().copied(), b.1.iter().copied()))
                    .collect();
                // Where no token went, a gradient is exactly 0.
                let unused = |e: usize| !c.ids.contains(&(e as i32));
                let not_zero = ours
                    .iter()
                    .filter(|o| o.0.starts_with("dw_") || o.0.starts_with("db_"))
                    .filter(|o| {
                        let len = o.1.len() / s.experts;
                        (0..s.experts).any(|e| unused(e) && o.1[e * len..][..len].iter().any(|&v| v != 0.0))
                    })
                    .count();
                let ours_hash = hash(&ours);
                let mut same = *bits.get_or_insert(ours_hash) == ours_hash;
                for _ in 0..3 {
                    same &= hash(&gpu.outcome(|| gpu.passes(false))?) == ours_hash;
                }
                gpu.passes(true)?;
                let twice = gpu.read()?;
                let adds = twice
                    .iter()
                    .zip(&reference)
                    .skip(3)
                    .all(|(a, b)| relative(a.0, a.1.iter().copied(), b.1.iter().map(|v| 2.0 * v)).1);
                let rounds = rounds_once(&c, &check_knobs(*rows), split, &ours)?;
                let good = compared.iter().all(|r| r.1) && not_zero == 0 && same && adds && rounds;
                bad += usize::from(!good);
                runs += 1;
                let text = compared.into_iter().map(|r| r.0).collect::<Vec<_>>().join(", ");
                println!(
                    "  {} rows {rows:?} split {split:?} bits {ours_hash:016x} {}{}{}{}: {text}",
                    if good { "ok  " } else { "MISS" },
                    if same { "same" } else { "OTHER BITS" },
                    if adds { "" } else { ", ACCUMULATES WRONG" },
                    if rounds { "" } else { ", BF16 GRADIENTS ARE OTHERS" },
                    if not_zero == 0 { "" } else { ", NOT ZERO WITHOUT ROWS" },
                );
            }
        }
    }
    println!("{runs} runs, {bad} wrong");
    if bad == 0 { Ok(()) } else { Err(format!("{bad} of {runs} runs are wrong").into()) }
}

/// Whether gradients in bf16 are those in f32, rounded once, and all else has the same bits; and whether they add up.
fn rounds_once(c: &Case, knobs: &Knobs, split: &[usize], in_f32: &Named) -> Outcome<bool> {
    let gpu: OnGpu<bf16> = on_gpu(c, knobs, split)?;
    let ours = gpu.outcome(|| gpu.passes(false))?;
    let is_weight = |name: &str| {
        name.starts_with("dw_") || (name.starts_with("d_shared") && !name.ends_with("output_gate"))
    };
    let mut good = true;
    for ((name, a), (_, b)) in ours.iter().zip(in_f32) {
        let round = |v: f32| if is_weight(name) { bf16::from_f32(v).to_f32() } else { v };
        good &= a.iter().zip(b).all(|(a, b)| a.to_bits() == round(*b).to_bits());
    }
    gpu.passes(true)?;
    let twice = gpu.read()?;
    good &= twice
        .iter()
        .zip(in_f32)
        .skip(3)
        .all(|(a, b)| relative(a.0, a.1.iter().copied(), b.1.iter().map(|v| 2.0 * v)).1);
    Ok(good)
}

/// The check that has everything, and its way over two ranks.
fn everything() -> (Case, Knobs, Vec<usize>) {
    let check = checks().into_iter().find(|c| c.name.contains("output gate")).expect("there is one");
    let (rows, split) = check.ways[2].clone();
    (case(&check.shape, check.tokens, Routes::Distinct, 1.0), check_knobs(rows), split)
}

fn stall() -> Outcome {
    let (c, knobs, split) = everything();
    let mut gpu: OnGpu = on_gpu(&c, &knobs, &split)?;
    let before = hash(&gpu.outcome(|| gpu.passes(false))?);
    gpu.layer.set_wait_limit(Duration::from_millis(500));
    // GateUp and Down of a forward; DHidden and DInput of a backward.
    for (pass, kind) in [(0, 2), (0, 3), (1, 4), (1, 5)] {
        for rank in 0..split.len() {
            gpu.layer.set_hang(Some(Hang { pass, rank, kind, block: 0, tile: 0 }));
            let start = Instant::now();
            let error = match gpu.passes(false) {
                Ok(()) => return Err("a task that hangs went unnoticed".into()),
                Err(e) => e.to_string(),
            };
            let took = start.elapsed();
            println!("{} ms: {error}", took.as_millis());
            if took > Duration::from_secs(3) || !error.contains(&format!("rank {rank} has pushed")) {
                return Err("not within the limit, or the rank is not named".into());
            }
            gpu.layer.set_hang(None);
            let after = hash(&gpu.outcome(|| gpu.passes(false))?);
            println!("  a pass after it: {}", if after == before { "same bits" } else { "OTHER BITS" });
            if after != before {
                return Err("other bits after a stall".into());
            }
        }
    }
    Ok(())
}

fn graph() -> Outcome {
    let device = Device::new(0)?;
    let (c, knobs, two) = everything();
    let tokens = two.iter().sum();
    for split in [vec![tokens], two] {
        let gpu: OnGpu = on_gpu(&c, &knobs, &split)?;
        let replay = gpu.layer.capture_on(&gpu.steps, &gpu.weights, Some(&gpu.gradients[..]))?;
        println!("split {split:?}: {:?}", replay.work());
        if replay.work().others != 0 {
            return Err("a pass does other things than kernels and fills".into());
        }
        for routes in [Routes::Distinct, Routes::Holes, Routes::One, Routes::Nowhere, Routes::Distinct] {
            let other = case(&c.shape, tokens, routes, 0.5);
            let step = &gpu.steps[0];
            step.x.write(&other.x)?;
            step.dy.write(&other.dy)?;
            step.ids.write(&other.ids)?;
            step.topk_weights.write(&other.weights)?;
            device.synchronize()?;
            let direct = hash(&gpu.outcome(|| gpu.passes(false))?);
            let replayed = hash(&gpu.outcome(|| {
                replay.launch()?;
                Ok(gpu.layer.finish()?)
            })?);
            println!("split {split:?} {routes:?}: direct {direct:016x} replayed {replayed:016x}");
            if direct != replayed {
                return Err("a replay has other bits".into());
            }
        }
    }
    Ok(())
}

/// One forward and backward of a tiny layer with everything: for compute-sanitizer.
fn once(ranks: usize) -> Outcome {
    let mut shape = Shape::new(64, 64, 4, 2);
    shape.biases = true;
    shape.shared = Some(Shared { intermediate: 64, output_gate: true });
    let knobs = check_knobs([128, 256, 128]);
    let c = case(&shape, 40, Routes::Holes, 1.0);
    let gpu: OnGpu = on_gpu(&c, &knobs, &Routing::even_split(40, ranks))?;
    gpu.passes(false)?;
    println!("{ranks} ranks: {:016x}", hash(&gpu.read()?));
    Ok(())
}

/// Time from nothing to the end of a first forward and backward; the copies of inputs and weights apart.
fn cold(name: &str) -> Outcome {
    let (_, [h, i, e, k]) = SHAPES.into_iter().find(|s| s.0 == name).ok_or("no such shape")?;
    let (shape, tokens) = (Shape::new(h, i, e, k), 8192);
    let c = case(&shape, tokens, Routes::Distinct, 1.0);
    let mut last = Instant::now();
    let mut lap = || {
        let now = Instant::now();
        let seconds = (now - std::mem::replace(&mut last, now)).as_secs_f32();
        format!("{seconds:.3} s")
    };
    let device = Device::new(0)?;
    let opened = lap();
    let step = DeviceStep::new(&shape, &c.x, &c.dy, &c.ids, &c.weights)?;
    let weights = DeviceWeights::from_host(&c.weights())?;
    let copied = lap();
    let gradients = new_gradients::<f32>(&shape)?;
    let layer = CudaLayer::new(
        std::slice::from_ref(&device),
        &shape,
        &time_knobs(&shape),
        &[tokens],
        Precision::F32,
    )?;
    let made = lap();
    layer.forward(&step, &weights)?;
    layer.backward(&step, &weights, &gradients, false)?;
    layer.finish()?;
    println!("{name}: device {opened}, copies {copied}, layer {made}, passes {}", lap());
    Ok(())
}

/// The defaults on a GPU, or what the environment says.
fn time_knobs(shape: &Shape) -> Knobs {
    let given = |name| std::env::var(name).ok().and_then(|v| v.parse::<usize>().ok());
    let defaults = Knobs::for_gpu(shape).with_rows(given("MB"), given("RING"), given("SAVED"));
    Knobs {
        fwd_comm_sms: given("COMM").unwrap_or(defaults.fwd_comm_sms),
        bwd_comm_sms: given("BCOMM").unwrap_or(defaults.bwd_comm_sms),
        ..defaults
    }
}

fn time<T: GradientElement>(names: &[String]) -> Outcome {
    let device = Device::new(0)?;
    println!("{} with {} SMs", device.name(), device.sms());
    let tokens = 8192;
    for (name, [h, i, e, k]) in SHAPES {
        if !names.is_empty() && !names.iter().any(|n| n == name) {
            continue;
        }
        let c = case(&Shape::new(h, i, e, k), tokens, Routes::Distinct, 1.0);
        let start = Instant::now();
        let gpu: OnGpu<T> = on_gpu(&c, &time_knobs(&c.shape), &[tokens])?;
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
        let schedule = run(&|| Ok(gpu.layer.schedule_on(&gpu.steps)?))?;
        let forward = run(&|| gpu.forward())?;
        let both = run(&|| {
            gpu.forward()?;
            gpu.backward(false)
        })?;
        let flops = c.shape.forward_flops(tokens, tokens * k);
        println!(
            "{name}, gradients {}: schedule {schedule:.3} ms, forward {forward:.3} ms {:.0} TFLOP/s, \
             both {both:.3} ms {:.0} TFLOP/s (setup {:.1} s)",
            T::PRECISION,
            flops / f64::from(forward) / 1e9,
            3.0 * flops / f64::from(both) / 1e9,
            setup.as_secs_f32()
        );
    }
    Ok(())
}

/// Parts of `probe compile`.
const SHARDS: usize = 16;

fn compile(shard: Option<usize>) -> Outcome {
    let mut all: Vec<(Shape, Knobs, Vec<usize>)> = Vec::new();
    for check in checks() {
        let ways =
            check.ways.iter().map(|(rows, split)| (check.shape.clone(), check_knobs(*rows), split.clone()));
        all.extend(ways);
    }
    // What `probe graph` adds.
    let (c, knobs, split) = everything();
    all.push((c.shape, knobs, vec![split.iter().sum()]));
    all.extend(SHAPES.iter().map(|&(_, [h, i, e, k])| {
        let shape = Shape::new(h, i, e, k);
        let knobs = time_knobs(&shape);
        (shape, knobs, vec![8192])
    }));
    for (index, (shape, knobs, tokens)) in all.into_iter().enumerate() {
        if shard.is_some_and(|s| s != index % SHARDS) {
            continue;
        }
        let [f32, bf16] =
            [Precision::F32, Precision::Bf16].map(|p| CudaLayer::defines(&shape, &knobs, &tokens, p));
        let (f32, bf16) = (f32?, bf16?);
        let all =
            jit::Source::ALL.map(|source| (source, &f32)).into_iter().chain([(jit::Source::Backward, &bf16)]);
        for (source, defines) in all {
            let cubin = jit::cubin(source, defines)?;
            for line in cubin.log.lines().filter(|l| l.contains("spill") || l.contains("Perf")) {
                println!("{source:?} {}x{}: {line}", shape.hidden, shape.intermediate);
            }
        }
    }
    Ok(())
}

fn main() -> Outcome {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let in_bf16 = std::env::var("GRADIENTS").is_ok_and(|v| v == "bf16");
    match arguments.first().map(String::as_str) {
        Some("compile") => compile(arguments.get(1).map(|n| n.parse()).transpose()?),
        Some("check") => check(),
        Some("time") if in_bf16 => time::<bf16>(&arguments[1..]),
        Some("time") => time::<f32>(&arguments[1..]),
        Some("stall") => stall(),
        Some("graph") => graph(),
        Some("once") => once(arguments.get(1).map_or(Ok(1), |n| n.parse())?),
        Some("cold") if arguments.len() == 2 => cold(&arguments[1]),
        _ => Err("compile [N], check, stall, graph, once [RANKS], cold SHAPE, or time [SHAPE ...]".into()),
    }
}
