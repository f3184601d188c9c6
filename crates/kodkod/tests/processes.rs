//! Ranks that are processes: this test starts itself again, once a rank, and looks at what each says.
#![cfg(unix)]

mod common;

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Random, Step, shapes};
use kodkod::program::Stream;
use kodkod::{
    Biases, CpuOptions, Element, Error, ExpertGroup, GradientElement, Isa, Knobs, MoeLayer, RankContext,
    RankLayer, Routing, Shape, SharedWeights, StallHook, WeightGradients, Weights, bf16,
};

// ---- the parent ----

/// Processes of a scenario, killed when dropped.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn name_of(scenario: &str, ranks: usize) -> String {
    format!("test-{scenario}-{ranks}-{}", std::process::id())
}

fn spawn(scenario: &str, rank: usize, ranks: usize) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_rank", "--ignored", "--nocapture", "--test-threads=1"])
        .env("KODKOD_TEST_SCENARIO", scenario)
        .env("KODKOD_TEST_RANK", rank.to_string())
        .env("KODKOD_TEST_RANKS", ranks.to_string())
        .env("KODKOD_TEST_NAME", name_of(scenario, ranks))
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

impl Ranks {
    fn start(scenario: &str, ranks: usize) -> Ranks {
        Ranks((0..ranks).map(|rank| spawn(scenario, rank, ranks)).collect())
    }

    /// What each rank printed, once all have ended; those in `dead` need not have ended well.
    fn finish(mut self, within: Duration, dead: &[usize]) -> Vec<String> {
        let end = Instant::now() + within;
        let mut said = Vec::new();
        for (rank, child) in self.0.iter_mut().enumerate() {
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                assert!(Instant::now() < end, "rank {rank} still runs after {within:?}");
                std::thread::sleep(Duration::from_millis(5));
            };
            let mut text = String::new();
            child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            let lines = text.lines().filter_map(|line| line.split_once("said: ").map(|(_, said)| said));
            let text = lines.map(|line| format!("{line}\n")).collect::<String>();
            print!("{}", text.lines().map(|line| format!("  rank {rank}: {line}\n")).collect::<String>());
            assert!(status.success() || dead.contains(&rank), "rank {rank}: {status}");
            said.push(text);
        }
        said
    }

    fn signal(&self, rank: usize, signal: &str) {
        let pid = self.0[rank].id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }
}

#[track_caller]
fn assert_nothing_left(scenario: &str, ranks: usize) {
    for folder in ["/dev/shm".into(), std::env::temp_dir()] {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        let name = format!("kodkod-{}", name_of(scenario, ranks));
        let left: Vec<_> =
            entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with(&name)).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

const SOON: Duration = Duration::from_secs(30);

#[test]
fn two_processes_give_the_bits_of_one() {
    Ranks::start("bits", 2).finish(SOON, &[]);
    assert_nothing_left("bits", 2);
}

#[test]
fn four_processes_give_the_bits_of_one() {
    Ranks::start("bits", 4).finish(SOON, &[]);
    assert_nothing_left("bits", 4);
}

// ---- a rank ----

fn say(text: impl std::fmt::Display) {
    println!("said: {text}");
}

struct Me {
    rank: usize,
    ranks: usize,
    name: String,
}

impl Me {
    fn join(&self, wait_limit: Duration) -> ExpertGroup {
        self.try_join(CpuOptions { threads: 1, wait_limit, ..CpuOptions::default() }).unwrap()
    }

    fn try_join(&self, options: CpuOptions) -> Result<ExpertGroup, Error> {
        ExpertGroup::cpu_processes(self.rank, self.ranks, &self.name, options)
    }
}

/// What a process does that was started as a rank.
#[test]
#[ignore = "the other tests start it"]
fn one_rank() {
    let var = |name: &str| std::env::var(format!("KODKOD_TEST_{name}"));
    let Ok(scenario) = var("SCENARIO") else { return };
    let number = |name: &str| var(name).unwrap().parse().unwrap();
    let me = Me { rank: number("RANK"), ranks: number("RANKS"), name: var("NAME").unwrap() };
    match scenario.as_str() {
        "bits" => bits(&me),
        other => panic!("no scenario {other}"),
    }
}

/// A rank's part of a step, and what it should give: by one rank alone, in this process.
struct Part<'a, T> {
    step: &'a Step<T>,
    layer: RankLayer<T>,
    rank: usize,
    split: Vec<usize>,
}

impl<'a, T: Element> Part<'a, T> {
    fn new(step: &'a Step<T>, group: &ExpertGroup, knobs: Knobs, split: &[usize]) -> Self {
        let layer = RankLayer::new(group, step.shape.clone(), knobs).unwrap();
        Part { step, layer, rank: group.rank().unwrap(), split: split.to_vec() }
    }

    /// This rank's part of what all tokens have, `width` a token.
    fn mine<'b, V>(&self, all: &'b [V], width: usize) -> &'b [V] {
        let start: usize = self.split[..self.rank].iter().sum();
        &all[start * width..][..self.split[self.rank] * width]
    }

    fn rows<'b>(&self, all: &'b [T]) -> &'b [T] {
        self.mine(all, self.step.shape.hidden)
    }

    /// This rank's part of what all experts have.
    fn experts<'b, V>(&self, all: &'b [V]) -> &'b [V] {
        let n = all.len() / self.split.len();
        &all[self.rank * n..][..n]
    }

    fn weights(&self) -> Weights<'a, T> {
        let step = self.step;
        Weights {
            gate: self.experts(&step.gate),
            up: self.experts(&step.up),
            down: self.experts(&step.down),
            biases: step.biases.as_ref().map(|b| Biases {
                gate: self.experts(&b.gate),
                up: self.experts(&b.up),
                down: self.experts(&b.down),
            }),
            shared: step.shared.as_ref().map(SharedWeights::as_slices),
        }
    }

    fn forward(&self) -> Result<(Vec<T>, RankContext<T>), Error> {
        let k = self.step.shape.top_k;
        let (ids, topk_weights) = (self.mine(&self.step.ids, k), self.mine(&self.step.topk_weights, k));
        self.layer.forward(self.rows(&self.step.x), ids, topk_weights, &self.weights())
    }

    fn backward<G: GradientElement>(
        &self,
        context: &RankContext<T>,
        g: &mut WeightGradients<Vec<G>, Vec<f32>>,
        accumulate: bool,
    ) -> Result<(Vec<T>, Vec<f32>), Error> {
        let (dy, x) = (self.rows(&self.step.dy), self.rows(&self.step.x));
        self.layer.backward(context, dy, x, &self.weights(), g.as_mut(), accumulate)
    }

    /// This rank's part of gradients of all experts.
    fn own<G: Copy>(&self, all: &WeightGradients<Vec<G>, Vec<f32>>) -> WeightGradients<Vec<G>, Vec<f32>> {
        WeightGradients {
            gate: self.experts(&all.gate).to_vec(),
            up: self.experts(&all.up).to_vec(),
            down: self.experts(&all.down).to_vec(),
            biases: all.biases.as_ref().map(|b| Biases {
                gate: self.experts(&b.gate).to_vec(),
                up: self.experts(&b.up).to_vec(),
                down: self.experts(&b.down).to_vec(),
            }),
            shared: all.shared.clone(),
        }
    }
}

#[track_caller]
fn same<T: Element>(what: &str, ours: &[T], expected: &[T]) {
    let bits = |values: &[T]| values.iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>();
    assert_eq!(ours.len(), expected.len(), "{what}");
    assert!(bits(ours) == bits(expected), "{what}: other bits than on one rank");
}

#[track_caller]
fn same_gradients<G: GradientElement>(
    what: &str,
    ours: &WeightGradients<Vec<G>, Vec<f32>>,
    expected: &WeightGradients<Vec<G>, Vec<f32>>,
) {
    let (ours, expected) = (ours.convert::<f32>(), expected.convert::<f32>());
    for ((name, a), (_, b)) in ours.named().into_iter().zip(expected.named()) {
        same(&format!("{what}: {name}"), a, b);
    }
}

fn splits(tokens: usize, ranks: usize) -> Vec<Vec<usize>> {
    let mut splits = vec![Routing::even_split(tokens, ranks)];
    for (first, second) in [(0, 12), (tokens, 0), (127, 1)] {
        let mut split = vec![0; ranks];
        (split[0], split[1]) = (first, second);
        split[ranks - 1] += tokens - first - second;
        splits.push(split);
    }
    splits
}

fn step_bits<T: Element, G: GradientElement + Element>(
    name: &str,
    step: &Step<T>,
    group: &ExpertGroup,
    knobs: Knobs,
    split: &[usize],
) {
    let alone = ExpertGroup::cpu_with(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
    let mut r = Random(23);
    for accumulate in [false, true] {
        let what = format!("{name}, {} ranks {split:?}, accumulate {accumulate}", group.ranks());
        let start: WeightGradients<Vec<G>, Vec<f32>> =
            WeightGradients::lens(&step.shape).map(|n| r.list::<G>(n, 3.0), |n| vec![0.5; n]);
        let mut expected = start.clone();
        let whole = Knobs::for_shape(&step.shape);
        let (y, dx, d_w) = step.run_into(&alone, whole, &[step.tokens()], &mut expected, accumulate).unwrap();
        let part = Part::new(step, group, knobs, split);
        let mut ours = part.own(&start);
        let (our_y, context) = part.forward().unwrap();
        same(&format!("{what}: y"), &our_y, part.rows(&y));
        let (our_dx, our_d_w) = part.backward(&context, &mut ours, accumulate).unwrap();
        same(&format!("{what}: dx"), &our_dx, part.rows(&dx));
        same(&format!("{what}: d_topk_weights"), &our_d_w, part.mine(&d_w, step.shape.top_k));
        same_gradients(&what, &ours, &part.own(&expected));
    }
}

fn bits(me: &Me) {
    let group = me.join(Duration::from_secs(20));
    let (mut calls, start) = (0, Instant::now());
    let all_knobs = [(128, 128, 0), (128, 384, 256), (512, 1024, Knobs::ALL)];
    for (name, shape) in shapes() {
        let (half, single) =
            (Step::<bf16>::random(shape.clone(), 333, 21), Step::<f32>::random(shape, 333, 22));
        for (i, split) in splits(333, me.ranks).iter().enumerate() {
            let (minibatch, ring, saved) = all_knobs[i % 3];
            let knobs = Knobs::for_shape(&half.shape).with_rows(Some(minibatch), Some(ring), Some(saved));
            step_bits::<bf16, bf16>(name, &half, &group, knobs, split);
            step_bits::<bf16, f32>(name, &half, &group, knobs, split);
            step_bits::<f32, f32>(name, &single, &group, knobs, split);
            calls += 12;
        }
    }
    say(format!("{calls} calls, the bits of one rank in each, in {:?}", start.elapsed()));
}
