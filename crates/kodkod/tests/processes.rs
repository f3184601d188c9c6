//! Ranks that are processes: this test starts itself again, once a rank, and looks at what each says.
#![cfg(unix)]

mod common;

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Random, Step, shapes};
use kodkod::program::Stream;
use kodkod::{
    Biases, CpuOptions, CudaOptions, Element, Error, ExpertGroup, GradientElement, Isa, Knobs, MoeLayer,
    RankContext, RankLayer, Routing, Shape, SharedWeights, StallHook, WeightGradients, Weights, bf16,
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
    spawn_as(scenario, &name_of(scenario, ranks), rank, ranks)
}

fn spawn_as(scenario: &str, name: &str, rank: usize, ranks: usize) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_rank", "--ignored", "--nocapture", "--test-threads=1"])
        .env("KODKOD_TEST_SCENARIO", scenario)
        .env("KODKOD_TEST_RANK", rank.to_string())
        .env("KODKOD_TEST_RANKS", ranks.to_string())
        .env("KODKOD_TEST_NAME", name)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

impl Ranks {
    fn start(scenario: &str, ranks: usize) -> Ranks {
        Ranks((0..ranks).map(|rank| spawn(scenario, rank, ranks)).collect())
    }

    /// What each rank printed, once all have ended; those in `dead` are killed when the others have.
    fn finish(mut self, dead: &[usize]) -> Vec<String> {
        let within = Duration::from_secs(30);
        let end = Instant::now() + within;
        for (rank, child) in self.0.iter_mut().enumerate().filter(|(rank, _)| !dead.contains(rank)) {
            while child.try_wait().unwrap().is_none() {
                assert!(Instant::now() < end, "rank {rank} still runs after {within:?}");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        let mut said = Vec::new();
        for (rank, child) in self.0.iter_mut().enumerate() {
            if dead.contains(&rank) {
                child.kill().unwrap();
            }
            let mut text = String::new();
            child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            let lines = text.lines().filter_map(|line| line.split_once("said: ").map(|(_, said)| said));
            let text = lines.map(|line| format!("{line}\n")).collect::<String>();
            print!("{}", text.lines().map(|line| format!("  rank {rank}: {line}\n")).collect::<String>());
            assert!(child.wait().unwrap().success() || dead.contains(&rank), "rank {rank} failed");
            said.push(text);
        }
        said
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

#[test]
fn two_processes_give_the_bits_of_one() {
    Ranks::start("bits", 2).finish(&[]);
    assert_nothing_left("bits", 2);
}

#[test]
fn four_processes_give_the_bits_of_one() {
    Ranks::start("bits", 4).finish(&[]);
    assert_nothing_left("bits", 4);
}

#[test]
fn layers_interleaved_and_contexts_used_twice_move_no_bit() {
    Ranks::start("layers", 2).finish(&[]);
}

#[test]
fn ranks_that_disagree_all_hear_who_and_what_and_go_on() {
    let said = Ranks::start("disagree", 3).finish(&[]);
    assert!(said[0] == said[1] && said[0] == said[2], "the same errors on every rank");
    let expected = [
        "hidden of rank 1 is 128: rank 0 has 64",
        "minibatch_rows of rank 1 is 256: rank 0 has 128",
        "precision of rank 1 is f32: rank 0 has bf16",
        "pass of rank 1 is forward: rank 0 has backward of call 4",
        "pass of rank 1 is backward of call 4: rank 0 has backward of call 6",
        "accumulate of rank 1 is true: rank 0 has false",
        "topk_ids[2, 1] is 6: allowed are 0 to 5 and -1",
        "x has 63 elements",
        "w_gate has 0 elements",
        "dy is on a far moon",
        "the same bits as before",
    ];
    let lines: Vec<_> = said[0].lines().collect();
    assert_eq!(lines.len(), expected.len());
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.contains(expected) && (line.contains("rank 1") || expected.contains("bits")), "{line}");
    }
}

/// The others' errors, each twice: the call's, and that of the call after it.
#[track_caller]
fn assert_all_name(scenario: &str, ranks: usize, dead: &[usize], named: &str) {
    println!("{scenario}:");
    let said = Ranks::start(scenario, ranks).finish(dead);
    for (rank, said) in said.iter().enumerate().filter(|(rank, _)| !dead.contains(rank)) {
        let lines: Vec<_> = said.lines().collect();
        assert_eq!(lines.len(), 2, "rank {rank}: {said}");
        assert!(lines.iter().all(|line| line.contains(named)), "rank {rank}: {said}");
        assert!(lines[1].contains("the group of processes is broken"), "rank {rank}: {said}");
    }
    assert_nothing_left(scenario, ranks);
}

#[test]
fn a_rank_killed_in_mid_pass_is_named_long_before_the_limit() {
    assert_all_name("killed-forward", 3, &[1], "rank 1 (process ");
    assert_all_name("killed-backward", 3, &[1], "rank 1 (process ");
}

#[test]
fn a_rank_that_ends_or_leaves_between_calls_is_named_long_before_the_limit() {
    assert_all_name("ended", 3, &[1], "has died before a forward");
    assert_all_name("left", 3, &[1], "has left the group before a forward");
}

#[test]
fn a_rank_that_hangs_or_is_stopped_or_does_not_come_is_named_within_the_limit() {
    assert_all_name("hangs", 3, &[], "rank 1 waited");
    assert_all_name("stopped", 3, &[1], "rank 1 waited");
    assert_all_name("late", 3, &[], ") did not come to a forward within 1000 ms");
}

/// One rank computes for longer than the limit while the others wait: no error, since it gets on.
#[test]
fn a_busy_rank_is_waited_for() {
    Ranks::start("busy", 2).finish(&[]);
}

#[test]
fn ranks_that_do_not_come_to_the_meeting_are_named() {
    let both = Ranks(vec![spawn("meeting", 0, 4), spawn("meeting", 1, 4)]);
    for said in both.finish(&[]) {
        assert!(said.contains("rank 2, rank 3 did not come to the meeting"), "{said}");
    }
    assert_nothing_left("meeting", 4);
    let alone = Ranks(vec![spawn("meeting", 1, 2)]).finish(&[]);
    assert!(alone[0].contains("rank 0 did not come within 1500 ms"), "{}", alone[0]);
    // Rank 1 of 3 meets rank 0 of 2; two processes are rank 1.
    let name = name_of("meeting", 3);
    let two =
        [((0, 2), (1, 3), "ranks of rank 1 is 3: rank 0 has 2"), ((1, 3), (1, 3), "rank 1 is given to two")];
    for (first, second, expected) in two {
        let mut ranks = vec![spawn_as("meeting", &name, first.0, first.1)];
        ranks.push(spawn_as("meeting", &name, second.0, second.1));
        if first.0 == 1 {
            ranks.push(spawn_as("meeting", &name, 0, 3));
        }
        let said = Ranks(ranks).finish(&[]);
        assert!(said.iter().all(|said| said.contains(expected)), "{said:?}");
        assert_nothing_left("meeting", 3);
    }
}

/// Without a driver both ranks hear that; with one, that rank 1 asks for a GPU that is not there.
#[test]
fn a_gpu_that_cannot_be_used_is_an_error_on_every_rank() {
    let said = Ranks::start("no-gpu", 2).finish(&[]);
    for said in &said {
        assert!(said.contains("CUDA driver") || said.contains("GPU 999"), "{said}");
    }
    assert_nothing_left("no-gpu", 2);
}

#[test]
fn a_file_that_a_killed_group_left_gives_way() {
    let file = format!("kodkod-{}", name_of("again", 2));
    let memory = std::path::Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.into() } else { std::env::temp_dir() };
    let path = folder.join(file);
    let mut alone = spawn("again", 0, 2);
    let end = Instant::now() + Duration::from_secs(10);
    while !path.exists() {
        assert!(Instant::now() < end, "no file");
        std::thread::sleep(Duration::from_millis(1));
    }
    alone.kill().unwrap();
    alone.wait().unwrap();
    assert!(path.exists(), "the killed process left its file");
    // The others may come first.
    let one = spawn("again", 1, 2);
    std::thread::sleep(Duration::from_millis(50));
    let said = Ranks(vec![spawn("again", 0, 2), one]).finish(&[]);
    assert!(said.iter().all(|said| said == "met\n"), "{said:?}");
    assert_nothing_left("again", 2);
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
        "layers" => layers(&me),
        "disagree" => disagree(&me),
        "busy" => busy(&me),
        "meeting" => {
            let wait_limit = Duration::from_millis(1500);
            say(me.try_join(CpuOptions { threads: 1, wait_limit, ..CpuOptions::default() }).unwrap_err());
        }
        "no-gpu" => {
            let device = if me.rank == 1 { 999 } else { 0 };
            let group = ExpertGroup::cuda_ipc(me.rank, me.ranks, &me.name, device, CudaOptions::default());
            say(group.unwrap_err());
        }
        "again" => {
            // A name is free again as soon as its group has met, and groups live beside each other.
            let groups = [(); 20].map(|()| me.join(Duration::from_secs(20)));
            assert!(groups.iter().all(|g| (g.rank(), g.ranks()) == (Some(me.rank), me.ranks)));
            let shape = Shape::new(64, 64, 4, 2);
            let step = Step::<bf16>::random(shape.clone(), 20, 71);
            for group in groups.iter().rev() {
                Part::new(&step, group, Knobs::for_shape(&shape), &[20, 0]).forward().unwrap();
            }
            say("met");
        }
        "killed-forward" | "killed-backward" | "ended" | "left" | "hangs" | "stopped" | "late" => {
            fails(&me, &scenario);
        }
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
        // No route at all, one expert for all, and no token on any rank.
        for (id, tokens) in [(Some(-1), 140), (Some(3), 140), (None, 0)] {
            let mut edge = Step::<bf16>::random(half.shape.clone(), tokens, 24);
            edge.ids.iter_mut().for_each(|to| *to = id.unwrap_or(*to));
            let knobs = Knobs::for_shape(&half.shape).with_rows(Some(128), Some(128), Some(0));
            let mut split = Routing::even_split(tokens, me.ranks);
            split[0] += std::mem::take(&mut split[1]);
            step_bits::<bf16, f32>(&format!("{name}, all {id:?}"), &edge, &group, knobs, &split);
            calls += 4;
        }
    }
    say(format!("{calls} calls, the bits of one rank in each, in {:?}", start.elapsed()));
}

/// Two layers of unequal shapes, two forwards of each before their backwards, and a context that is used twice.
fn layers(me: &Me) {
    let group = me.join(Duration::from_secs(20));
    let alone = ExpertGroup::cpu(1).unwrap();
    let shapes = shapes();
    let steps: Vec<_> = [(0, 300, 31), (5, 200, 32), (0, 150, 33), (5, 300, 34)]
        .map(|(shape, tokens, seed)| {
            let (name, shape) = &shapes[shape];
            (*name, Step::<bf16>::random(shape.clone(), tokens, seed))
        })
        .into();
    let mut contexts = Vec::new();
    for (i, (name, step)) in steps.iter().enumerate() {
        // Part of the rows stay in the ring, which the next forward takes.
        let knobs = Knobs::for_shape(&step.shape).with_rows(Some(128), Some(256), Some(128));
        let part = Part::new(step, &group, knobs, &splits(step.tokens(), me.ranks)[i % 2]);
        let (y, context) = part.forward().unwrap();
        contexts.push((name, part, y, context));
    }
    for (i, times) in [(3, 1), (0, 2), (2, 1), (1, 2)] {
        let (name, part, y, context) = &contexts[i];
        let mut expected = WeightGradients::zeros(&part.step.shape);
        let whole = Knobs::for_shape(&part.step.shape);
        let all = [part.step.tokens()];
        let (y_alone, dx_alone, _) = part.step.run_into(&alone, whole, &all, &mut expected, false).unwrap();
        same(&format!("{name}: y"), y, part.rows(&y_alone));
        for _ in 0..times {
            let mut ours = part.own(&WeightGradients::<Vec<f32>, _>::zeros(&part.step.shape));
            let (dx, _) = part.backward(context, &mut ours, false).unwrap();
            same(&format!("{name}: dx"), &dx, part.rows(&dx_alone));
            same_gradients(name, &ours, &part.own(&expected));
        }
    }
    // What a call costs beyond its arithmetic.
    let tiny = Step::<bf16>::random(Shape::new(64, 64, 4, 2), 2 * me.ranks, 35);
    let knobs = Knobs::for_shape(&tiny.shape);
    let part = Part::new(&tiny, &group, knobs, &vec![2; me.ranks]);
    let time = |call: &dyn Fn()| {
        let mut times: Vec<_> = (0..200)
            .map(|_| {
                let start = Instant::now();
                call();
                start.elapsed()
            })
            .collect();
        times.sort_unstable();
        times[100]
    };
    let processes = time(&|| drop(part.forward().unwrap()));
    say(format!("a forward of two tokens a rank takes {processes:?} in {} processes (median)", me.ranks));
}

fn disagree(me: &Me) {
    let group = me.join(Duration::from_secs(20));
    let odd = me.rank == 1;
    let shape = Shape::new(64, 64, 6, 2);
    let knobs = Knobs::for_shape(&shape).with_rows(Some(128), Some(256), None);
    let split = vec![50; me.ranks];
    let step = Step::<bf16>::random(shape.clone(), 150, 41);
    let part = Part::new(&step, &group, knobs, &split);
    let error = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        // The odd rank's own error needs not say which rank that is.
        let text = error.to_string();
        let text = text.replace(['\t', '\n'], " ");
        match text.split_once(" is refused: ") {
            Some((_, why)) => say(format!("rank 1: {why}")),
            None if text.contains("rank 1") => say(text),
            None => say(format!("rank 1: {text}")),
        }
    };
    // 1: hidden
    let wide = Step::<bf16>::random(Shape { hidden: if odd { 128 } else { 64 }, ..shape.clone() }, 150, 42);
    error(Part::new(&wide, &group, knobs, &split).forward().map(drop));
    // 2: knobs
    let other = if odd { knobs.with_rows(Some(256), Some(256), None) } else { knobs };
    let other = Knobs { ring_rows: 256, ..other };
    error(Part::new(&step, &group, other, &split).forward().map(drop));
    // 3: precision
    let single = Step::<f32>::random(shape.clone(), 150, 41);
    error(match odd {
        true => Part::new(&single, &group, knobs, &split).forward().map(drop),
        false => part.forward().map(drop),
    });
    // 4 is right; 5: passes in another order
    let (y, first) = part.forward().unwrap();
    let mut g = part.own(&WeightGradients::<Vec<f32>, _>::zeros(&shape));
    error(match odd {
        true => part.forward().map(drop),
        false => part.backward(&first, &mut g, false).map(drop),
    });
    // 6 is right; 7: the backward of another forward; 8: accumulate
    let (_, second) = part.forward().unwrap();
    error(part.backward(if odd { &first } else { &second }, &mut g, false).map(drop));
    error(part.backward(&first, &mut g, odd).map(drop));
    // 9 to 12: arguments of one rank alone
    let (x, weights) = (part.rows(&step.x), part.weights());
    let (ids, topk_weights) = (part.mine(&step.ids, 2), part.mine(&step.topk_weights, 2));
    let mut bad = ids.to_vec();
    if odd {
        bad[5] = 6;
    }
    error(part.layer.forward(x, &bad, topk_weights, &weights).map(drop));
    let short = if odd { &x[..63] } else { x };
    error(part.layer.forward(short, ids, topk_weights, &weights).map(drop));
    let none = Weights { gate: if odd { &[] } else { weights.gate }, ..weights };
    error(part.layer.forward(x, ids, topk_weights, &none).map(drop));
    error(match odd {
        true => Err(group.refuse(Error::Machine("dy is\ton a\nfar moon".into()))),
        false => part.backward(&first, &mut g, false).map(drop),
    });
    // And all is well again.
    let (again, _) = part.forward().unwrap();
    same("y", &again, &y);
    part.backward(&first, &mut g, false).unwrap();
    say("the same bits as before");
    let one = ExpertGroup::cpu(1).unwrap();
    assert!(RankLayer::<f32>::new(&one, shape.clone(), knobs).unwrap_err().to_string().contains("MoeLayer"));
    assert!(MoeLayer::<f32>::new(&group, shape, knobs).unwrap_err().to_string().contains("RankLayer"));
}

/// Rank 1 spoils a call; the others say what they hear then, and in the next call.
fn fails(me: &Me, how: &str) {
    let odd = me.rank == 1;
    let limit = match how {
        "hangs" | "stopped" | "late" => Duration::from_secs(1),
        _ => Duration::from_secs(20),
    };
    let in_pass = matches!(how, "killed-forward" | "killed-backward" | "hangs" | "stopped");
    let hook = StallHook { rank: 1, stream: Stream::Compute, ticket: 1 };
    let stall = Some(hook).filter(|_| odd && in_pass);
    let options = CpuOptions { threads: 1, wait_limit: limit, stall, ..CpuOptions::default() };
    let (shape, split) = (Shape::new(64, 64, 6, 2), vec![50; me.ranks]);
    let step = Step::<bf16>::random(shape.clone(), 150, 51);
    let knobs = Knobs::for_shape(&shape);
    // A context needs no more of its group than the number of ranks: the forward goes well in a group of its own.
    let saved = (how == "killed-backward").then(|| {
        let first = Me { name: format!("{}-first", me.name), ..*me }.join(limit);
        Part::new(&step, &first, knobs, &split).forward().unwrap().1
    });
    let group = me.try_join(options).unwrap();
    let signal_soon = |signal: &'static str| {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            Command::new("kill").args([signal, &std::process::id().to_string()]).status().unwrap();
        });
    };
    let part = Part::new(&step, &group, knobs, &split);
    let mut g = part.own(&WeightGradients::<Vec<f32>, _>::zeros(&shape));
    match how {
        "killed-forward" | "killed-backward" if odd => signal_soon("-KILL"),
        "stopped" if odd => signal_soon("-STOP"),
        "ended" if odd => std::process::exit(0),
        "late" if odd => std::thread::sleep(3 * limit),
        _ => {}
    }
    if how == "left" && odd {
        drop((part, group));
        std::thread::sleep(Duration::from_secs(60)); // until the test kills it
        return;
    }
    let start = Instant::now();
    let mut call = || match &saved {
        Some(context) => part.backward(context, &mut g, false).map(drop),
        None => part.forward().map(drop),
    };
    let error = call().unwrap_err();
    let took = start.elapsed();
    say(format!("after {} ms: {error}", took.as_millis()));
    match how {
        // The limit, and time for all to say what they were at.
        "hangs" | "stopped" | "late" => assert!(took < 4 * limit, "{took:?}"),
        _ => assert!(took < Duration::from_secs(5), "{took:?}"),
    }
    if matches!(how, "hangs" | "stopped") {
        assert!(matches!(error, Error::Stalled(_)));
    }
    let start = Instant::now();
    say(call().unwrap_err());
    assert!(start.elapsed() < Duration::from_millis(100));
}

fn busy(me: &Me) {
    let options = CpuOptions {
        threads: 1,
        isa: Some(Isa::Scalar),
        wait_limit: Duration::from_millis(700),
        ..CpuOptions::default()
    };
    let group = me.try_join(options).unwrap();
    // Many small tasks: one alone is not to take as long as the limit, also on a busy machine.
    let shape = Shape::new(128, 128, 2, 1);
    let mut step = Step::<bf16>::random(shape.clone(), 6400, 61);
    step.ids.fill(1); // rank 1's
    let knobs = Knobs::for_shape(&shape).with_rows(Some(128), Some(256), None);
    let part = Part::new(&step, &group, knobs, &[3200, 3200]);
    let start = Instant::now();
    let (_, context) = part.forward().unwrap();
    let forward = start.elapsed();
    part.backward(&context, &mut part.own(&WeightGradients::<Vec<f32>, _>::zeros(&shape)), false).unwrap();
    let backward = start.elapsed() - forward;
    say(format!("forward {forward:?}, backward {backward:?}, with a limit of 700 ms"));
    assert!(backward > Duration::from_millis(700), "too fast to show anything");
}
