//! The device's decoder of tickets, `kernels/program.cuh`, compiled for the host and held against kodkod-core's
//! `Program::task`, ticket by ticket.

use std::path::{Path, PathBuf};
use std::process::Command;

use kodkod_core::program::{Arrive, Counter, Kind, Pass, Program, Run, Stream, Task, Tiles, Wait, Weight};
use kodkod_core::schedule::Layout;
use kodkod_core::{Knobs, ROW_BLOCK, Shape, Shared};
use libloading::{Library, Symbol};

/// Programs that are compared, each over all of its tickets.
const CASES: u64 = 6000;
/// Tickets compared of a stream: all of most programs; of large ones an even choice with both ends.
const TICKETS: u64 = 4000;

const SHIM: &str = r#"
#include "program.cuh"
using namespace program;
extern "C" {
u64 size_of(u32 which) { return which == 0 ? sizeof(Program) : sizeof(Task); }
u64 tickets_of(const Program* p, u32 stream) { return tickets(*p, stream); }
// As a worker does: the step is kept from ticket to ticket of a program's stream.
void decode_at(const Program* p, u32 stream, u64 ticket, Task* t) {
    static Step at;
    static const Program* last;
    static u32 last_stream;
    if (ticket == 0 || p != last || stream != last_stream) at = Step();
    last = p, last_stream = stream;
    decode(*p, stream, ticket, at, *t);
}
u32 place_of(const Program* p, u32 name, u32 index) { return place(*p, {name, index}); }
u32 row_of(const Program* p, u32 which, u32 block) {
    return which == 0 ? kept_row(*p, block) : which == 1 ? ring_row(*p, block) : which == 2 ? rows_in(*p, block) : expert_of(*p, block);
}
u32 stays(const Program* p, u32 grad, u32 block, u32 other) { return row_stays(*p, grad, block, other); }
}
"#;

/// `program::Program`
#[repr(C)]
struct DeviceProgram {
    pass: u32,
    rank: u32,
    ranks: u32,
    rows: *const u32,
    first_block: *const u32,
    first_run: *const u32,
    experts: u32,
    routed: u32,
    per_minibatch: u32,
    minibatches: u32,
    ring: u32,
    saved: u32,
    kept: u32,
    gate_up_tiles: [u32; 2],
    d_hidden_tiles: [u32; 2],
    hidden_tiles: u32,
    gate_grid: [[u32; 2]; 2],
    down_grid: [[u32; 2]; 2],
    output_gate: u32,
    chunks: u32,
    pushing: u32,
    chain_after: u32,
    chain_next: u32,
    zero_shared: u32,
}

/// `program::Task`
#[repr(C)]
#[derive(Debug, Default)]
struct DeviceTask {
    kind: u32,
    a: u32,
    b: u32,
    weight: u32,
    tile_m: u32,
    tile_n: u32,
    first: u32,
    last: u32,
    /// index, expert, minibatch, block, blocks
    run: [u32; 5],
    /// name, index, at least
    waits: [[u32; 3]; 2],
    /// what, rank, name, index
    arrives: [[u32; 4]; 2],
}

/// The host's build of the decoder. The folder goes with it.
struct Decoder {
    library: Library,
    _folder: Folder,
}

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Decoder {
    /// `None` where there is no C++ compiler, unless `KODKOD_REQUIRE_CXX` is set: continuous integration sets it.
    fn build(name: &str) -> Option<Self> {
        let folder = format!("kodkod-decoder-{name}-{}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(folder));
        std::fs::create_dir_all(&folder.0).expect("a folder for the build");
        let (source, library) = (folder.0.join("decoder.cpp"), folder.0.join("libdecoder.so"));
        std::fs::write(&source, SHIM).expect("the shim is written");
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let given = std::env::var("CXX").ok();
        let compilers = given.as_deref().into_iter().chain(["c++", "g++", "clang++"]);
        let mut tried = Vec::new();
        for compiler in compilers {
            let output = Command::new(compiler)
                .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-I"])
                .arg(&kernels)
                .arg(&source)
                .arg("-o")
                .arg(&library)
                .output();
            match output {
                Err(error) => tried.push(format!("{compiler}: {error}")),
                Ok(output) => {
                    let words = String::from_utf8_lossy(&output.stderr);
                    assert!(output.status.success(), "{compiler} does not compile program.cuh:\n{words}");
                    // SAFETY: the library has no initialisers.
                    let library = unsafe { Library::new(&library) }.expect("the library loads");
                    return Some(Decoder { library, _folder: folder });
                }
            }
        }
        let tried = tried.join(", ");
        println!(
            "NOT RUN: a C++ compiler is needed to test the device's decoder: install g++, or set CXX; {tried}"
        );
        assert!(std::env::var_os("KODKOD_REQUIRE_CXX").is_none(), "KODKOD_REQUIRE_CXX is set");
        None
    }

    /// # Safety
    /// `T` is the symbol's type.
    unsafe fn symbol<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: the caller's contract.
        unsafe { self.library.get(name.as_bytes()) }.expect("the shim has it")
    }
}

/// xorshift64*
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
    fn chance(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }
}

/// A layout of one rank, any counts.
fn layout(local: usize, shared: bool, most: u64, r: &mut Random) -> Layout {
    let mut rows: Vec<u32> = (0..local)
        .map(|_| match r.below(4) {
            0 => 0,
            1 => r.below(130) as u32,
            _ => r.below(most) as u32,
        })
        .collect();
    if shared {
        rows.push(if r.chance(3) { 0 } else { r.below(most) as u32 });
    }
    let mut first_block = vec![0];
    for &n in &rows {
        first_block.push(first_block[first_block.len() - 1] + n.div_ceil(ROW_BLOCK as u32));
    }
    Layout { rows, first_block, routed: local }
}

/// The rank's runs before each expert, as `schedule_layout` counts them.
fn first_runs(layout: &Layout, per_minibatch: u32) -> Vec<u32> {
    let mut runs = vec![0];
    for pair in layout.first_block.windows(2) {
        let more =
            if pair[0] == pair[1] { 0 } else { (pair[1] - 1) / per_minibatch - pair[0] / per_minibatch + 1 };
        runs.push(runs[runs.len() - 1] + more);
    }
    runs
}

fn name_of(counter: Counter) -> (u32, u32) {
    match counter {
        Counter::Done => (0, 0),
        Counter::Pushed => (1, 0),
        Counter::Chain(i) => (2, i),
        Counter::Pulled(i) => (3, i),
        Counter::GradPulled(i) => (4, i),
        Counter::Hidden(i) => (5, i),
        Counter::GradHidden(i) => (6, i),
        Counter::Free(i) => (7, i),
    }
}

fn counter(name: u32, i: u32) -> Counter {
    match name {
        0 => Counter::Done,
        1 => Counter::Pushed,
        2 => Counter::Chain(i),
        3 => Counter::Pulled(i),
        4 => Counter::GradPulled(i),
        5 => Counter::Hidden(i),
        6 => Counter::GradHidden(i),
        7 => Counter::Free(i),
        other => panic!("a counter {other}"),
    }
}

impl DeviceTask {
    /// The same task in Rust's words.
    fn task(&self) -> Task {
        let (block, b) = (self.a, self.b);
        let kind = match self.kind {
            0 => Kind::Pull { block, source: b },
            1 => Kind::PullGrad { block, source: b },
            2 => Kind::GateUp { block, tile: b },
            3 => Kind::Down { block, tile: b },
            4 => Kind::DHidden { block, tile: b },
            5 => Kind::DInput { block, tile: b },
            6 => Kind::WGrad {
                weight: [Weight::Gate, Weight::Up, Weight::Down, Weight::OutputGate][self.weight as usize],
                run: {
                    let [index, expert, minibatch, block, blocks] = self.run;
                    Run { index, expert, minibatch, block, blocks }
                },
                tile_m: self.tile_m,
                tile_n: self.tile_n,
                first: self.first == 1,
                last: self.last == 1,
            },
            7 => Kind::ZeroGrad { expert: self.a },
            8 => Kind::Skip,
            9 => Kind::Reduce { chunk: self.a },
            10 => Kind::ReduceGrad { chunk: self.a },
            other => panic!("a kind {other}"),
        };
        let waits = self.waits.map(|[name, index, at_least]| {
            (at_least > 0).then(|| Wait { counter: counter(name, index), at_least })
        });
        let arrives = self.arrives.map(|[what, rank, name, index]| match what {
            0 => None,
            1 => Some(Arrive::Here(counter(name, index))),
            2 => Some(Arrive::At { rank, counter: counter(name, index) }),
            3 => Some(Arrive::Pushed { total: rank }),
            other => panic!("an arrival {other}"),
        });
        Task { kind, waits, arrives }
    }
}

/// One rank of one random layer, in both forms. The device's points into `layout` and `_runs`.
struct Case {
    core: Program,
    device: DeviceProgram,
    layout: Layout,
    _runs: Vec<u32>,
    text: String,
}

fn case(seed: u64) -> Case {
    let mut r = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let ranks = r.pick(&[1, 1, 2, 3, 4, 8]);
    let local = 1 + r.below(6) as usize;
    let width = |r: &mut Random| 8 * (1 + r.below(200)) as usize;
    let (hidden, intermediate) = (width(&mut r), width(&mut r));
    let mut shape = Shape::new(hidden, intermediate, local * ranks, 1);
    if r.chance(2) {
        shape.shared = Some(Shared { intermediate: width(&mut r), output_gate: r.chance(2) });
    }
    // The GPU's tiles, or any.
    let tiles = match r.chance(2) {
        true => Tiles { gate_up_n: 128, d_hidden_n: 256, hidden_n: 256, wgrad_m: 128, wgrad_n: 256 },
        false => {
            let mut n = || 8 * (1 + r.below(64)) as u32;
            Tiles { gate_up_n: n(), d_hidden_n: n(), hidden_n: n(), wgrad_m: n(), wgrad_n: n() }
        }
    };
    let most = r.pick(&[2, 200, 1000, 3000]);
    let layouts: Vec<_> = (0..ranks)
        .map(|_| {
            // A rank without rows now and then.
            let most = if r.chance(6) { 1 } else { most };
            let mut layout = layout(local, shape.shared.is_some(), most.max(1), &mut r);
            if most == 1 {
                layout.rows.fill(0);
                layout.first_block.fill(0);
            }
            layout
        })
        .collect();
    let tokens: Vec<_> = (0..ranks).map(|_| r.below(200) as usize).collect();
    let rank = r.below(ranks as u64) as usize;
    let layout = layouts[rank].clone();
    let minibatch_rows = ROW_BLOCK * (1 + r.below(9) as usize);
    let knobs = Knobs {
        minibatch_rows,
        ring_rows: minibatch_rows * (1 + r.below(5) as usize),
        saved_rows: match r.below(3) {
            0 => 0,
            1 => Knobs::ALL,
            _ => r.below(4000) as usize,
        },
        ..Knobs::for_shape(&shape)
    };
    let pass = if r.chance(2) { Pass::Forward } else { Pass::Backward };
    let ring_holds = pass == Pass::Backward && r.chance(2);
    let all: Vec<_> = layouts.iter().collect();
    let core = Program::new(pass, &shape, &knobs, &tiles, &all, &tokens, rank, ring_holds);

    // What the host and `schedule_layout` write.
    let blocks = layout.blocks();
    let per_minibatch = (minibatch_rows / ROW_BLOCK) as u32;
    let minibatches = blocks.div_ceil(per_minibatch);
    let ring = ((knobs.ring_rows / minibatch_rows) as u32).min(minibatches.max(1));
    let saved = match knobs.saved_rows >= blocks as usize * ROW_BLOCK {
        true => minibatches,
        false => (knobs.saved_rows / minibatch_rows) as u32,
    };
    let widths = [intermediate, shape.shared.map_or(0, |s| s.intermediate)];
    let cut = |n: usize, by: u32| (n as u32).div_ceil(by);
    let holds_shared = |r: usize| shape.shared.is_some() && layouts[r].rows[local] > 0;
    let runs = first_runs(&layout, per_minibatch);
    let device = DeviceProgram {
        pass: pass as u32,
        rank: rank as u32,
        ranks: ranks as u32,
        rows: layout.rows.as_ptr(),
        first_block: layout.first_block.as_ptr(),
        first_run: runs.as_ptr(),
        experts: layout.rows.len() as u32,
        routed: local as u32,
        per_minibatch,
        minibatches,
        ring,
        saved,
        kept: if ring_holds { (saved + ring).min(minibatches) } else { saved },
        gate_up_tiles: widths.map(|w| cut(w, tiles.gate_up_n)),
        d_hidden_tiles: widths.map(|w| cut(w, tiles.d_hidden_n)),
        hidden_tiles: cut(hidden, tiles.hidden_n),
        gate_grid: widths.map(|w| [cut(w, tiles.wgrad_m), cut(hidden, tiles.wgrad_n)]),
        down_grid: widths.map(|w| [cut(hidden, tiles.wgrad_m), cut(w, tiles.wgrad_n)]),
        output_gate: u32::from(shape.shared.is_some_and(|s| s.output_gate)),
        chunks: tokens[rank].div_ceil(32) as u32,
        pushing: layouts.iter().filter(|l| l.blocks() > 0).count() as u32,
        chain_after: u32::from((0..rank).any(holds_shared)),
        chain_next: (rank + 1..ranks).find(|&r| holds_shared(r)).unwrap_or(ranks) as u32,
        zero_shared: u32::from(rank == 0 && !(0..ranks).any(holds_shared)),
    };
    let text =
        format!("case {seed}: {shape:?}, {knobs:?}, {tiles:?}, {pass:?}, rank {rank} of {ranks}, {layout:?}");
    Case { core, device, layout, _runs: runs, text }
}

type SizeOf = extern "C" fn(u32) -> u64;
type TicketsOf = extern "C" fn(*const DeviceProgram, u32) -> u64;
type DecodeAt = extern "C" fn(*const DeviceProgram, u32, u64, *mut DeviceTask);
type PlaceOf = extern "C" fn(*const DeviceProgram, u32, u32) -> u32;
type RowOf = extern "C" fn(*const DeviceProgram, u32, u32) -> u32;

type Stays = extern "C" fn(*const DeviceProgram, u32, u32, u32) -> u32;

/// Where a pull copies a row from another row's slot, that row is pulled by earlier tickets, or was saved by the forward, and
/// no pull of this pass uses the slot again before this block's products are done.
#[test]
fn rows_that_stay_are_there_and_stay() {
    let Some(decoder) = Decoder::build("stays") else { return };
    // SAFETY: the types are those of the shim.
    let stays = unsafe { decoder.symbol::<Stays>("stays") };
    let mut counts = [[0_u64; 3]; 2];
    for seed in 0..CASES / 4 {
        let case = case(seed);
        let (core, text) = (&case.core, &case.text);
        // The last ticket that pulls a block of x, and of dy.
        let mut last = [std::collections::BTreeMap::new(), std::collections::BTreeMap::new()];
        let mut first = last.clone();
        for ticket in 0..core.tickets(Stream::Comm) {
            let (grad, block) = match core.task(Stream::Comm, ticket).kind {
                Kind::Pull { block, .. } => (0, block),
                Kind::PullGrad { block, .. } => (1, block),
                _ => break,
            };
            last[grad].insert(block, ticket);
            first[grad].entry(block).or_insert(ticket);
        }
        let per_minibatch = case.device.per_minibatch;
        for grad in [0, 1] {
            let slot = |block| if grad == 0 { core.kept_row(block) } else { core.ring_row(block) };
            for (&block, &own) in &first[grad] {
                for other in 0..case.layout.blocks() {
                    let answer = stays(&case.device, grad as u32, block, other);
                    counts[grad][answer as usize] += 1;
                    if answer == 0 {
                        continue;
                    }
                    match last[grad].get(&other) {
                        Some(&pulled) if answer == 1 => {
                            assert!(pulled < own, "block {other} is pulled after {block} of {text}")
                        }
                        None if answer == 2 => {
                            assert!(grad == 0 && other / per_minibatch < case.device.saved)
                        }
                        pulled => panic!("{answer} for {other}, pulled {pulled:?}, at {block} of {text}"),
                    }
                    // The same minibatch's slots are used again only after its products.
                    let reused = |b: &u32| *b != other && slot(*b) == slot(other);
                    let reuse = first[grad].keys().find(|b| reused(b));
                    assert!(
                        other / per_minibatch == block / per_minibatch || reuse.is_none(),
                        "the slot of block {other} is also that of {reuse:?}, at {block} of {text}"
                    );
                }
            }
        }
    }
    println!("pairs of blocks: x gone, pulled before, saved {:?}; dy {:?}", counts[0], counts[1]);
    assert!(counts[0].iter().all(|&n| n > 0) && counts[1][0] > 0 && counts[1][1] > 0);
}

#[test]
fn device_and_host_decode_alike() {
    let Some(decoder) = Decoder::build("alike") else { return };
    // SAFETY: the types are those of the shim.
    let (bytes_of, tickets_of, decode_at, place_of, row_of) = unsafe {
        (
            decoder.symbol::<SizeOf>("size_of"),
            decoder.symbol::<TicketsOf>("tickets_of"),
            decoder.symbol::<DecodeAt>("decode_at"),
            decoder.symbol::<PlaceOf>("place_of"),
            decoder.symbol::<RowOf>("row_of"),
        )
    };
    assert_eq!(bytes_of(0) as usize, size_of::<DeviceProgram>(), "bytes of a Program");
    assert_eq!(bytes_of(1) as usize, size_of::<DeviceTask>(), "bytes of a Task");

    let (mut compared, mut kinds) = (0_u64, std::collections::BTreeMap::<String, u64>::new());
    for seed in 0..CASES {
        let case = case(seed);
        let (core, device, text) = (&case.core, &case.device, &case.text);
        for block in 0..case.layout.blocks() {
            let theirs = [0, 1, 2, 3].map(|which| row_of(device, which, block) as usize);
            let ours = [
                core.kept_row(block),
                core.ring_row(block),
                case.layout.rows_in(block),
                case.layout.expert_of(block),
            ];
            assert_eq!(theirs, ours, "kept row, ring row, rows, expert of block {block} of {text}");
        }
        for (number, stream) in [(0, Stream::Comm), (1, Stream::Compute)] {
            let tickets = core.tickets(stream);
            assert_eq!(tickets_of(device, number), tickets, "tickets of {stream:?} of {text}");
            let step = (tickets / TICKETS).max(1);
            for ticket in (0..tickets).step_by(step as usize).chain(tickets.checked_sub(1)) {
                let mut theirs = DeviceTask::default();
                decode_at(device, number, ticket, &mut theirs);
                let mut ours = core.task(stream, ticket);
                // A wait for 0 is none.
                ours.waits = ours.waits.map(|wait| wait.filter(|w| w.at_least > 0));
                assert_eq!(theirs.task(), ours, "{stream:?} ticket {ticket} of {text}");
                let waits = ours.waits.iter().flatten().map(|wait| wait.counter);
                let arrives = ours.arrives.iter().flatten().map(|arrive| match *arrive {
                    Arrive::Here(counter) | Arrive::At { counter, .. } => counter,
                    Arrive::Pushed { .. } => Counter::Pushed,
                });
                for counter in waits.chain(arrives).chain([Counter::Done]) {
                    let (name, index) = name_of(counter);
                    let place = place_of(device, name, index) as usize;
                    assert_eq!(place, core.place(counter), "the place of {counter} of {text}");
                    assert!(place < core.counters(), "{counter} is within the counters of {text}");
                }
                compared += 1;
                let name = ours.kind.to_string();
                *kinds.entry(name.split('(').next().unwrap_or_default().to_owned()).or_default() += 1;
            }
        }
    }
    println!("{compared} tickets of {CASES} programs: {kinds:?}");
    assert_eq!(kinds.len(), 14, "every kind of task, each weight's gradient by itself");
}
