//! Ranks that are processes with a GPU each. This program starts itself once a rank; each compares the bits of its part with
//! those of one rank on its GPU, in the same process.
//!
//!     ipc [--devices 0,1] [--repeats 20]    all options, ragged splits, layers in between, rows on the GPU
//!     ipc --kill [--devices 0,1]            the last rank is killed while all queue passes, then while they wait for the
//!                                           kernels of their last pass: the others name it
//!     ipc --compile [--devices 0,1]         fills the kernel cache; no GPU is needed
//!
//! With a device twice (`--devices 0,0`) the GPU runs the processes by turns: slow, and waits may outlast the limit.

#[path = "../tests/common/mod.rs"]
mod common;

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::Step;
use kodkod::cuda::driver::Stream;
use kodkod::cuda::{CudaLayer, DeviceStep, DeviceWeights, jit, new_gradients, read_gradients};
use kodkod::{
    Activation, Biases, CudaOptions, DeviceRankLayer, ExpertGroup, GradientElement, Knobs, Precision,
    RankLayer, Routing, Shape, Shared, WeightGradients, Weights, bf16,
};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;
/// In `T`, those of gate, up and down.
type Gradients<T> = WeightGradients<Vec<T>, Vec<f32>>;

const LIMIT: Duration = Duration::from_secs(15);

struct Arguments {
    devices: Vec<usize>,
    repeats: usize,
    kill: bool,
    /// Of a rank: the last one dies then.
    dies: Option<Dies>,
    compile: bool,
    /// Where this process is a rank: which, and of which group.
    rank: Option<(usize, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Dies {
    /// Its parent kills it while all queue passes and look after each few.
    Queueing,
    /// It kills itself when its last pass is queued, long before that is done.
    Waiting,
}

fn arguments() -> Outcome<Arguments> {
    let mut parsed =
        Arguments { devices: vec![0, 1], repeats: 20, kill: false, dies: None, compile: false, rank: None };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let mut value = || given.next().ok_or(format!("{name} needs a value"));
        match name.as_str() {
            "--kill" => parsed.kill = true,
            "--dies" => {
                let when = value()?;
                let known = [Dies::Queueing, Dies::Waiting].into_iter().find(|d| format!("{d:?}") == when);
                parsed.dies = Some(known.ok_or(format!("--dies {when}"))?);
            }
            "--compile" => parsed.compile = true,
            "--repeats" => parsed.repeats = value()?.parse()?,
            "--devices" => parsed.devices = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--rank" => parsed.rank = Some((value()?.parse()?, value()?)),
            _ => return Err(format!("{name}: --devices, --repeats, --kill or --compile").into()),
        }
    }
    Ok(parsed)
}

fn main() {
    let done = arguments().and_then(|a| match &a.rank {
        Some((rank, name)) => match a.dies {
            Some(dies) => until_one_dies(&a, dies, *rank, name),
            None => compare(&a, *rank, name).map_err(|e| format!("rank {rank}: {e}").into()),
        },
        None if a.compile => compile(&a),
        None if a.kill => start(&a, Some(Dies::Queueing)).and_then(|()| start(&a, Some(Dies::Waiting))),
        None => start(&a, None),
    });
    if let Err(error) = done {
        println!("FAILED: {error}");
        std::process::exit(1);
    }
}

// ---- the parent ----

/// Killed when dropped.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(a: &Arguments, dies: Option<Dies>) -> Outcome {
    let begin = Instant::now();
    let name = format!("ipc-{}-{dies:?}", std::process::id());
    let devices = a.devices.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let spawn = |rank: usize| {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--devices", &devices, "--repeats", &a.repeats.to_string()]);
        command.args(["--rank", &rank.to_string(), &name]);
        if let Some(dies) = dies {
            command.args(["--dies", &format!("{dies:?}")]).stdout(Stdio::piped());
        }
        command.spawn()
    };
    let mut ranks = Ranks((0..a.devices.len()).map(spawn).collect::<Result<_, _>>()?);
    let dead = dies.map(|_| a.devices.len() - 1);
    if let Some((dead, dies)) = dead.zip(dies) {
        // Each says when its passes begin, then what it hears.
        let mut said = Vec::new();
        for child in &mut ranks.0 {
            let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
            let first = lines.next().transpose()?.unwrap_or_default();
            if first != "begins" {
                return Err(format!("a rank did not come to begin: {first}").into());
            }
            said.push(lines);
        }
        if dies == Dies::Queueing {
            std::thread::sleep(Duration::from_millis(500));
            ranks.0[dead].kill()?;
        }
        let killed = Instant::now();
        println!("{dies:?}, rank {dead}, process {}: {}", ranks.0[dead].id(), ranks.0[dead].wait()?);
        for (rank, lines) in said.iter_mut().enumerate().filter(|(rank, _)| *rank != dead) {
            let heard = lines.next().transpose()?.unwrap_or_default();
            let took = killed.elapsed();
            println!("rank {rank} at {} ms: {heard}", took.as_millis());
            if !heard.contains(&format!("rank {dead} (process {})", ranks.0[dead].id())) || took > LIMIT {
                return Err("it does not name the dead rank within the limit".into());
            }
        }
    }
    let end = Instant::now() + 10 * LIMIT;
    for (rank, child) in ranks.0.iter_mut().enumerate().filter(|(rank, _)| Some(*rank) != dead) {
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() > end => return Err(format!("rank {rank} still runs").into()),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        if !status.success() {
            return Err(format!("rank {rank}: {status}").into());
        }
    }
    println!("OK, {} processes on GPUs {devices}, {:.1} s", a.devices.len(), begin.elapsed().as_secs_f64());
    Ok(())
}

// ---- what is run ----

struct Case {
    name: &'static str,
    step: Step<bf16>,
    knobs: Knobs,
    splits: Vec<Vec<usize>>,
}

fn cases(ranks: usize) -> Vec<Case> {
    let mut all = Shape::new(192, 320, 8, 3);
    all.biases = true;
    all.shared = Some(Shared { intermediate: 128, output_gate: true });
    all.activation = Activation::SwiGluOai { alpha: 1.702, limit: Some(1.2) };
    let plain = Shape::new(512, 256, 16, 4);
    let splits = |tokens: usize| {
        let last = |n: usize| [vec![0; ranks - 1], vec![n]].concat();
        // Evenly; all on the last rank; few on the last.
        let mut few = Routing::even_split(tokens - 5, ranks);
        few[ranks - 1] = 5;
        few[0] = tokens - few[1..].iter().sum::<usize>();
        vec![Routing::even_split(tokens, ranks), last(tokens), few]
    };
    let case = |name, shape: Shape, tokens, knobs| Case {
        name,
        step: Step::random(shape, tokens, 81),
        knobs,
        splits: splits(tokens),
    };
    let small = Knobs::for_gpu(&all).with_rows(Some(128), Some(256), Some(128));
    let large = Knobs::for_gpu(&plain);
    vec![case("all options", all, 700, small), case("plain", plain, 8192, large)]
}

/// A pass of some milliseconds.
fn long(ranks: usize) -> Case {
    let (shape, tokens) = (Shape::new(1024, 512, 16, 4), 32_768);
    let (knobs, splits) = (Knobs::for_gpu(&shape), vec![Routing::even_split(tokens, ranks)]);
    Case { name: "long", step: Step::random(shape, tokens, 82), knobs, splits }
}

fn compile(a: &Arguments) -> Outcome {
    let ranks = a.devices.len();
    for case in cases(ranks).into_iter().chain([long(ranks)]) {
        for split in case.splits.iter().chain([&vec![case.step.tokens()]]) {
            for gradients in [Precision::F32, Precision::Bf16] {
                let defines = CudaLayer::defines(&case.step.shape, &case.knobs, split, gradients)?;
                let meet = (split.len() > 1 || ranks == 1).then_some(jit::Source::Meet);
                for source in jit::Source::ALL.into_iter().chain(meet) {
                    jit::cubin(source, &defines)?;
                }
            }
        }
    }
    Ok(())
}

impl Case {
    /// This rank's part of what all tokens have, `each` a token.
    fn tokens<'a, T>(&self, all: &'a [T], each: usize, split: &[usize], rank: usize) -> &'a [T] {
        let first: usize = split[..rank].iter().sum();
        &all[first * each..(first + split[rank]) * each]
    }

    fn experts(&self, rank: usize, ranks: usize) -> std::ops::Range<usize> {
        let each = self.step.shape.experts / ranks;
        rank * each..(rank + 1) * each
    }

    fn weights(&self, rank: usize, ranks: usize) -> Weights<'_, bf16> {
        self.step.weights().of_experts(&self.step.shape, self.experts(rank, ranks))
    }
}

/// This rank's of all experts' gradients.
fn own<T: Copy>(g: &Gradients<T>, rank: usize, ranks: usize) -> Gradients<T> {
    fn part<T: Copy>(all: &[T], rank: usize, ranks: usize) -> Vec<T> {
        all.chunks(all.len() / ranks).nth(rank).unwrap_or_default().to_vec()
    }
    Gradients {
        gate: part(&g.gate, rank, ranks),
        up: part(&g.up, rank, ranks),
        down: part(&g.down, rank, ranks),
        biases: g.biases.as_ref().map(|b| Biases {
            gate: part(&b.gate, rank, ranks),
            up: part(&b.up, rank, ranks),
            down: part(&b.down, rank, ranks),
        }),
        shared: g.shared.clone(),
    }
}

/// What accumulates: other numbers everywhere.
fn before<T: GradientElement>(shape: &Shape) -> Gradients<T> {
    let mut next = 0;
    let mut fill = |n: usize| {
        next += 1;
        (0..n).map(|i| ((i * 7 + next) % 64) as f32 / 16.0 - 2.0).collect::<Vec<_>>()
    };
    let lens = WeightGradients::lens(shape);
    let rounded = |values: Vec<f32>| values.into_iter().map(T::from_f32).collect::<Vec<T>>();
    let f32s = lens.map(&mut fill, |n| vec![0.5; n]);
    f32s.map(rounded, |rest| rest)
}

/// What all tokens give on one rank.
struct Expected<T> {
    y: Vec<bf16>,
    dx: Vec<bf16>,
    d_topk_weights: Vec<f32>,
    gradients: Gradients<T>,
}

fn expected<T: GradientElement>(case: &Case, alone: &ExpertGroup, accumulate: bool) -> Outcome<Expected<T>> {
    let mut gradients = before::<T>(&case.step.shape);
    let all = [case.step.tokens()];
    let (y, dx, d_topk_weights) = case.step.run_into(alone, case.knobs, &all, &mut gradients, accumulate)?;
    Ok(Expected { y, dx, d_topk_weights, gradients })
}

fn same<T: kodkod::Element>(what: &str, ours: &[T], theirs: &[T]) -> Outcome {
    let (a, b) = (ours.iter().map(|v| v.to_f32().to_bits()), theirs.iter().map(|v| v.to_f32().to_bits()));
    match a.zip(b).position(|(a, b)| a != b) {
        None if ours.len() == theirs.len() => Ok(()),
        None => Err(format!("{what}: {} values, not {}", ours.len(), theirs.len()).into()),
        Some(at) => {
            let (a, b) = (ours[at].to_f32(), theirs[at].to_f32());
            Err(format!("{what}[{at}] is {a:e}, on one rank {b:e}").into())
        }
    }
}

fn same_gradients<T: GradientElement>(what: &str, ours: &Gradients<T>, theirs: &Gradients<T>) -> Outcome {
    let (ours, theirs) = (ours.convert::<f32>(), theirs.convert::<f32>());
    ours.named()
        .into_iter()
        .zip(theirs.named())
        .try_for_each(|((name, a), (_, b))| same(&format!("{what}: {name}"), a, b))
}

// ---- a rank ----

fn compare(a: &Arguments, rank: usize, name: &str) -> Outcome {
    let ranks = a.devices.len();
    // The others compile too, where the cache lacks kernels.
    let options = CudaOptions { wait_limit: 4 * LIMIT };
    let group = ExpertGroup::cuda_ipc(rank, ranks, name, a.devices[rank], options)?;
    let alone = ExpertGroup::cuda(&a.devices[rank..=rank])?;
    let cases = cases(ranks);
    for case in &cases {
        rows_of_the_host::<f32>(a, case, &group, &alone, rank, false)?;
        rows_of_the_host::<f32>(a, case, &group, &alone, rank, true)?;
        rows_of_the_host::<bf16>(a, case, &group, &alone, rank, true)?;
    }
    between(&cases, &group, &alone, rank)?;
    for case in &cases {
        rows_on_the_gpu::<bf16>(a, case, &group, &alone, rank)?;
        rows_on_the_gpu::<f32>(a, case, &group, &alone, rank)?;
    }
    refused(&cases[0], &group, rank)
}

fn say(rank: usize, text: impl std::fmt::Display) {
    if rank == 0 {
        println!("{text}");
    }
}

/// All splits, many times.
fn rows_of_the_host<T: GradientElement>(
    a: &Arguments,
    case: &Case,
    group: &ExpertGroup,
    alone: &ExpertGroup,
    rank: usize,
    accumulate: bool,
) -> Outcome {
    let (ranks, shape) = (group.ranks(), &case.step.shape);
    let expected = expected::<T>(case, alone, accumulate)?;
    let (h, k) = (shape.hidden, shape.top_k);
    let layer = RankLayer::<bf16>::new(group, shape.clone(), case.knobs)?;
    let weights = case.weights(rank, ranks);
    let what = format!("{}, {}{}", case.name, T::PRECISION, if accumulate { ", accumulating" } else { "" });
    let begin = Instant::now();
    for repeat in 0..a.repeats {
        let split = &case.splits[repeat % case.splits.len()];
        let what = format!("{what}, {split:?}, repeat {repeat}");
        let mine = |all| case.tokens(all, h, split, rank);
        let (ids, topk_weights) = (
            case.tokens(&case.step.ids, k, split, rank),
            case.tokens(&case.step.topk_weights, k, split, rank),
        );
        let (y, context) = layer.forward(mine(&case.step.x), ids, topk_weights, &weights)?;
        same(&format!("{what}: y"), &y, mine(&expected.y))?;
        let mut g = own(&before::<T>(shape), rank, ranks);
        let (dx, d_w) = layer.backward(
            &context,
            mine(&case.step.dy),
            mine(&case.step.x),
            &weights,
            g.as_mut(),
            accumulate,
        )?;
        same(&format!("{what}: dx"), &dx, mine(&expected.dx))?;
        same(
            &format!("{what}: d_topk_weights"),
            &d_w,
            case.tokens(&expected.d_topk_weights, k, split, rank),
        )?;
        same_gradients(&what, &g, &own(&expected.gradients, rank, ranks))?;
    }
    let each = begin.elapsed().as_secs_f64() * 1e3 / a.repeats as f64;
    say(rank, format!("{what}: the bits of one rank, {} times, {each:.1} ms each with copies", a.repeats));
    Ok(())
}

/// Forwards of two layers, then their backwards; a backward after another forward of its layer, and twice.
fn between(cases: &[Case], group: &ExpertGroup, alone: &ExpertGroup, rank: usize) -> Outcome {
    let ranks = group.ranks();
    let layers = cases.iter().map(|c| RankLayer::<bf16>::new(group, c.step.shape.clone(), c.knobs));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    let expected = cases.iter().map(|c| expected::<f32>(c, alone, false)).collect::<Outcome<Vec<_>>>()?;
    let mut contexts = Vec::new();
    for (at, split) in [(0, 0), (1, 1), (0, 2), (1, 0)] {
        let (case, split) = (&cases[at], &cases[at].splits[split]);
        let (h, k) = (case.step.shape.hidden, case.step.shape.top_k);
        let of = |all, each| case.tokens(all, each, split, rank);
        let (ids, topk_weights) = (
            case.tokens(&case.step.ids, k, split, rank),
            case.tokens(&case.step.topk_weights, k, split, rank),
        );
        let (_, context) =
            layers[at].forward(of(&case.step.x, h), ids, topk_weights, &case.weights(rank, ranks))?;
        contexts.push((at, split, context));
    }
    for from in [2, 0, 3, 1, 1] {
        let (at, split, context) = &contexts[from];
        let (case, expected) = (&cases[*at], &expected[*at]);
        let h = case.step.shape.hidden;
        let of = |all| case.tokens(all, h, split, rank);
        let mut g = own(&before::<f32>(&case.step.shape), rank, ranks);
        let weights = case.weights(rank, ranks);
        let (dx, _) = layers[*at].backward(
            context,
            of(&case.step.dy),
            of(&case.step.x),
            &weights,
            g.as_mut(),
            false,
        )?;
        let what = format!("{} after other forwards", case.name);
        same(&format!("{what}: dx"), &dx, of(&expected.dx))?;
        same_gradients(&what, &g, &own(&expected.gradients, rank, ranks))?;
    }
    say(rank, "layers in between each other: the bits of one rank");
    Ok(())
}

/// A rank's part on its GPU.
struct OnGpu<T> {
    layer: DeviceRankLayer,
    step: DeviceStep,
    weights: DeviceWeights,
    gradients: WeightGradients<kodkod::cuda::driver::Buffer<T>, kodkod::cuda::driver::Buffer<f32>>,
    stream: Stream,
}

impl<T: GradientElement> OnGpu<T> {
    fn new(case: &Case, group: &ExpertGroup, split: &[usize]) -> Outcome<Self> {
        let (shape, rank, ranks) = (&case.step.shape, group.rank().unwrap_or(0), group.ranks());
        let layer = DeviceRankLayer::new(group, shape.clone(), case.knobs)?;
        layer.device().make_current()?;
        let of = |all, each| case.tokens(all, each, split, rank);
        let (h, k) = (shape.hidden, shape.top_k);
        let (ids, topk_weights) = (
            case.tokens(&case.step.ids, k, split, rank),
            case.tokens(&case.step.topk_weights, k, split, rank),
        );
        let step = DeviceStep::new(shape, of(&case.step.x, h), of(&case.step.dy, h), ids, topk_weights)?;
        let gradients = new_gradients(layer.own_experts())?;
        let weights = DeviceWeights::from_host(&case.weights(rank, ranks))?;
        Ok(OnGpu { layer, step, weights, gradients, stream: Stream::new()? })
    }

    fn queue(&self) -> Outcome {
        let context = self.layer.forward(&self.step, &self.weights, T::PRECISION, &self.stream)?;
        let g = &self.gradients;
        Ok(self.layer.backward(&context, &self.step, &self.weights, g, false, &self.stream)?)
    }
}

/// Many passes are queued, and waited for at the end.
fn rows_on_the_gpu<T: GradientElement>(
    a: &Arguments,
    case: &Case,
    group: &ExpertGroup,
    alone: &ExpertGroup,
    rank: usize,
) -> Outcome {
    let (split, h) = (&case.splits[0], case.step.shape.hidden);
    let expected = expected::<T>(case, alone, false)?;
    let on_gpu = OnGpu::<T>::new(case, group, split)?;
    on_gpu.queue()?;
    on_gpu.layer.finish()?;
    let begin = Instant::now();
    for _ in 0..a.repeats {
        on_gpu.queue()?;
    }
    on_gpu.layer.finish()?;
    let each = begin.elapsed().as_secs_f64() * 1e3 / a.repeats as f64;
    let what = format!("{}, {} on the GPU", case.name, T::PRECISION);
    same(&format!("{what}: y"), &on_gpu.step.y.read()?, case.tokens(&expected.y, h, split, rank))?;
    same(&format!("{what}: dx"), &on_gpu.step.dx.read()?, case.tokens(&expected.dx, h, split, rank))?;
    let ours = read_gradients(&on_gpu.gradients)?;
    same_gradients(&what, &ours, &own(&expected.gradients, rank, group.ranks()))?;
    say(rank, format!("{what}: the bits of one rank, {} steps queued, {each:.3} ms each", a.repeats));
    Ok(())
}

/// What one rank gets wrong is an error on all, and the next call is right.
fn refused(case: &Case, group: &ExpertGroup, rank: usize) -> Outcome {
    let (split, last) = (&case.splits[0], group.ranks() - 1);
    let (shape, odd) = (&case.step.shape, rank == last);
    let (h, k) = (shape.hidden, shape.top_k);
    let weights = case.weights(rank, group.ranks());
    let x = case.tokens(&case.step.x, h, split, rank);
    let ids = case.tokens(&case.step.ids, k, split, rank);
    let topk_weights = case.tokens(&case.step.topk_weights, k, split, rank);
    let layer = RankLayer::<bf16>::new(group, shape.clone(), case.knobs)?;
    let short = layer.forward(if odd { &x[1..] } else { x }, ids, topk_weights, &weights).map(drop);
    let other = case.knobs.with_rows(Some(256), Some(512), Some(256));
    let differs = RankLayer::<bf16>::new(group, shape.clone(), if odd { other } else { case.knobs })?;
    let differ = differs.forward(x, ids, topk_weights, &weights).map(drop);
    for (outcome, named) in [(short, "x has"), (differ, "minibatch_rows of rank")] {
        match outcome {
            Err(error) if error.to_string().contains(named) || last == 0 => {
                say(rank, format!("refused: {error}"))
            }
            Err(error) => return Err(format!("it should name `{named}`: {error}").into()),
            Ok(()) if last == 0 => {}
            Ok(()) => return Err(format!("`{named}` was not refused").into()),
        }
    }
    layer.forward(x, ids, topk_weights, &weights)?;
    Ok(())
}

/// Queues passes until one fails, and says why; or dies.
fn until_one_dies(a: &Arguments, dies: Dies, rank: usize, name: &str) -> Outcome {
    let options = CudaOptions { wait_limit: LIMIT };
    let group = ExpertGroup::cuda_ipc(rank, a.devices.len(), name, a.devices[rank], options)?;
    let case = match dies {
        Dies::Queueing => &cases(a.devices.len())[1],
        Dies::Waiting => &long(a.devices.len()),
    };
    let on_gpu = OnGpu::<bf16>::new(case, &group, &case.splits[0])?;
    on_gpu.queue()?;
    on_gpu.layer.finish()?;
    println!("begins");
    let error = match dies {
        Dies::Queueing => loop {
            let passes = || (0..20).try_for_each(|_| on_gpu.queue());
            if let Err(error) = passes().and_then(|()| Ok(on_gpu.layer.finish()?)) {
                break error;
            }
        },
        Dies::Waiting => {
            (0..50).try_for_each(|_| on_gpu.queue())?;
            if rank + 1 == a.devices.len() {
                Command::new("kill").args(["-9", &std::process::id().to_string()]).status()?;
            }
            match on_gpu.layer.finish() {
                Err(error) => error.into(),
                Ok(()) => return Err("all passes were done before the last rank was dead".into()),
            }
        }
    };
    println!("{error}");
    match on_gpu.queue() {
        Err(error) if error.to_string().contains("is broken") => Ok(()),
        other => Err(format!("the group should be broken: {other:?}").into()),
    }
}
