//! Every task once, in an order that can always go on, and no slot filled again too early: over random shapes,
//! routings and knobs, with ready tasks taken in random order and ended in another.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::shape::Shared;

/// What lies in the slots of a rank: for each slot row block, the block whose rows it holds.
#[derive(Default, Clone)]
struct Slots {
    x: HashMap<usize, HashMap<u32, u32>>,
    g: HashMap<usize, HashMap<u32, u32>>,
    h: HashMap<usize, HashMap<u32, u32>>,
    dy: HashMap<usize, HashMap<u32, u32>>,
    dg: HashMap<usize, HashMap<u32, u32>>,
}

fn write(slots: &mut HashMap<usize, HashMap<u32, u32>>, row: usize, part: u32, block: u32) {
    slots.entry(row).or_default().insert(part, block);
}

fn holds(
    slots: &HashMap<usize, HashMap<u32, u32>>,
    row: usize,
    parts: u32,
    block: u32,
) -> Result<(), TestCaseError> {
    for part in 0..parts {
        let found = slots.get(&row).and_then(|s| s.get(&part));
        prop_assert_eq!(found, Some(&block), "slot row {}, part {}", row, part);
    }
    Ok(())
}

/// A tile of a weight gradient: owner (a rank, or all), expert or slot, weight, m, n.
type Tile = (usize, u32, u8, u32, u32);

struct Run2<'a> {
    programs: &'a [Program],
    counters: Vec<Vec<u32>>,
    slots: &'a mut [Slots],
    /// (pushing rank, block, tile) seen by Down or DInput.
    pushed: HashMap<(usize, u32, u32), u32>,
    /// Blocks that each expert's tile has summed, in order.
    summed: HashMap<Tile, Vec<u32>>,
    /// Sums that are not complete, by slot (of a routed expert: the parity of the minibatch that left it): the expert
    /// and its blocks so far.
    carried: HashMap<Tile, (u32, Vec<u32>)>,
    zeroed: Vec<(usize, u32)>,
    reduced: HashMap<(usize, u32), u32>,
}

impl Run2<'_> {
    fn ready(&self, rank: usize, task: &Task) -> bool {
        let value = |w: &Wait| self.counters[rank][self.programs[rank].place(w.counter)];
        task.waits.iter().flatten().all(|w| value(w) >= w.at_least)
    }

    fn run(&mut self, rank: usize, task: &Task) -> Result<(), TestCaseError> {
        let p = &self.programs[rank];
        let slots = &mut self.slots[rank];
        match task.kind {
            Kind::Pull { block, source } => write(&mut slots.x, p.kept_row(block), source, block),
            Kind::PullGrad { block, source } => write(&mut slots.dy, p.ring_row(block), source, block),
            Kind::GateUp { block, tile } => {
                holds(&slots.x, p.kept_row(block), p.ranks, block)?;
                write(&mut slots.g, p.kept_row(block), tile, block);
                if p.pass == Pass::Forward {
                    write(&mut slots.h, p.ring_row(block), tile, block);
                }
            }
            Kind::Down { block, tile } => {
                holds(&slots.h, p.ring_row(block), p.of_block(&p.gate_up_tiles, block), block)?;
                *self.pushed.entry((rank, block, tile)).or_default() += 1;
            }
            Kind::DHidden { block, tile } => {
                holds(&slots.dy, p.ring_row(block), p.ranks, block)?;
                holds(&slots.g, p.kept_row(block), p.of_block(&p.gate_up_tiles, block), block)?;
                write(&mut slots.dg, p.ring_row(block), tile, block);
            }
            Kind::DInput { block, tile } => {
                holds(&slots.dg, p.ring_row(block), p.of_block(&p.d_hidden_tiles, block), block)?;
                *self.pushed.entry((rank, block, tile)).or_default() += 1;
            }
            Kind::WGrad { weight, run, tile_m, tile_n, first, last } => {
                for block in run.block..run.block + run.blocks {
                    holds(&slots.x, p.kept_row(block), p.ranks, block)?;
                    holds(&slots.dy, p.ring_row(block), p.ranks, block)?;
                    holds(&slots.dg, p.ring_row(block), p.of_block(&p.d_hidden_tiles, block), block)?;
                }
                // Shared experts have one gradient for all ranks.
                let shared = run.expert as usize == p.layout.routed && p.gate_up_tiles[1] > 0;
                let owner = if shared { usize::MAX } else { rank };
                let slot = |minibatch: u32| {
                    let slot = if shared { 0 } else { minibatch % 2 };
                    (owner, slot, weight as u8, tile_m, tile_n)
                };
                let mut sum = Vec::new();
                if !first {
                    let before = if shared { 0 } else { run.minibatch - 1 };
                    let (expert, blocks) = self.carried.remove(&slot(before)).expect("a sum to go on from");
                    prop_assert_eq!(expert, run.expert);
                    sum = blocks;
                }
                sum.extend((run.block..run.block + run.blocks).map(|b| rank as u32 * 100_000 + b));
                let lost = match last {
                    true => {
                        self.summed.insert((owner, run.expert, weight as u8, tile_m, tile_n), sum).is_some()
                    }
                    false => self.carried.insert(slot(run.minibatch), (run.expert, sum)).is_some(),
                };
                prop_assert!(!lost, "a sum overwritten by {}", task.kind);
            }
            Kind::ZeroGrad { expert } => self.zeroed.push((rank, expert)),
            Kind::Skip => {}
            Kind::Reduce { chunk } | Kind::ReduceGrad { chunk } => {
                for (r, p) in self.programs.iter().enumerate() {
                    for block in 0..p.layout.blocks() {
                        for tile in 0..p.hidden_tiles {
                            prop_assert_eq!(self.pushed.get(&(r, block, tile)), Some(&1));
                        }
                    }
                }
                *self.reduced.entry((rank, chunk)).or_default() += 1;
            }
        }
        for arrive in task.arrives.iter().flatten() {
            match *arrive {
                Arrive::Here(c) => self.counters[rank][p.place(c)] += 1,
                Arrive::At { rank, counter } => {
                    self.counters[rank as usize][self.programs[rank as usize].place(counter)] += 1;
                }
                Arrive::Pushed { total } => {
                    let pushed = &mut self.counters[rank][p.place(Counter::Pushed)];
                    *pushed += 1;
                    if *pushed == total {
                        (0..self.programs.len()).for_each(|r| self.counters[r][0] += 1);
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes ready heads of streams and ends tasks that were taken, chosen by `pick`, until none is left.
    fn finish(&mut self, mut pick: u64) -> Result<(), TestCaseError> {
        let mut next = vec![[0_u64; 2]; self.programs.len()];
        let mut taken: Vec<(usize, Task)> = Vec::new();
        let streams = [Stream::Comm, Stream::Compute];
        loop {
            let mut heads = Vec::new();
            for (rank, p) in self.programs.iter().enumerate() {
                heads.extend(
                    streams.iter().filter(|&&s| next[rank][s as usize] < p.tickets(s)).map(|&s| (rank, s)),
                );
            }
            if heads.is_empty() && taken.is_empty() {
                return Ok(());
            }
            let task = |(rank, s): (usize, Stream)| self.programs[rank].task(s, next[rank][s as usize]);
            heads.retain(|&head| self.ready(head.0, &task(head)));
            prop_assert!(!heads.is_empty() || !taken.is_empty(), "no task can run");
            pick = pick.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let choice = (pick >> 33) as usize;
            // Most tasks end late: the more of them are under way, the more can go wrong.
            if heads.is_empty() || (!taken.is_empty() && choice.is_multiple_of(16)) {
                let (rank, task) = taken.swap_remove(choice / 16 % taken.len());
                self.run(rank, &task)?;
            } else {
                let (rank, stream) = heads[choice % heads.len()];
                taken.push((rank, task((rank, stream))));
                next[rank][stream as usize] += 1;
            }
        }
    }
}

fn check_pass(
    pass: Pass,
    shape: &Shape,
    knobs: &Knobs,
    tiles: &Tiles,
    routing: &Routing,
    ring_holds: bool,
    slots: &mut [Slots],
    pick: u64,
) -> Result<(), TestCaseError> {
    let schedules: Vec<_> = (0..routing.ranks()).map(|r| Schedule::new(shape, routing, r)).collect();
    let programs = Program::all(pass, shape, knobs, tiles, routing, &schedules, ring_holds);
    let mut run = Run2 {
        programs: &programs,
        counters: programs.iter().map(|p| vec![0; p.counters()]).collect(),
        slots,
        pushed: HashMap::new(),
        summed: HashMap::new(),
        carried: HashMap::new(),
        zeroed: Vec::new(),
        reduced: HashMap::new(),
    };
    run.finish(pick)?;
    for (rank, p) in programs.iter().enumerate() {
        let chunks = routing.tokens_of(rank).len().div_ceil(REDUCE_TOKENS) as u32;
        prop_assert!((0..chunks).all(|c| run.reduced.get(&(rank, c)) == Some(&1)));
        for minibatch in 0..p.minibatches {
            let free = run.counters[rank][p.place(Counter::Free(minibatch))];
            prop_assert_eq!(free, p.free_total(minibatch));
        }
        let rows = (p.kept_slot_rows(), p.ring_slot_rows());
        for block in 0..p.layout.blocks() {
            prop_assert!(p.kept_row(block) + ROW_BLOCK <= rows.0 && p.ring_row(block) + ROW_BLOCK <= rows.1);
        }
    }
    if pass == Pass::Forward {
        return Ok(());
    }
    prop_assert!(run.carried.is_empty(), "sums that nobody went on from");
    // Each expert with rows has every gradient tile summed over all its blocks in order; each without is zeroed.
    let cut = |n: usize, by: u32| (n as u32).div_ceil(by);
    for (rank, p) in programs.iter().enumerate() {
        for expert in 0..p.layout.rows.len() {
            let shared = expert == p.layout.routed;
            let width = if shared { shape.shared.unwrap().intermediate } else { shape.intermediate };
            let (gate, down) = (
                (cut(width, tiles.wgrad_m), cut(shape.hidden, tiles.wgrad_n)),
                (cut(shape.hidden, tiles.wgrad_m), cut(width, tiles.wgrad_n)),
            );
            let expected: Vec<u32> = if shared {
                let of = |(r, p): (usize, &Program)| {
                    (p.layout.first_block[expert]..p.layout.blocks())
                        .map(move |b| r as u32 * 100_000 + b)
                        .collect::<Vec<_>>()
                };
                programs.iter().enumerate().flat_map(of).collect()
            } else {
                (p.layout.first_block[expert]..p.layout.first_block[expert + 1])
                    .map(|b| rank as u32 * 100_000 + b)
                    .collect()
            };
            let zeroed =
                run.zeroed.iter().filter(|z| z.1 as usize == expert && (shared || z.0 == rank)).count();
            prop_assert_eq!(zeroed, usize::from(expected.is_empty()));
            if expected.is_empty() {
                continue;
            }
            let owner = if shared { usize::MAX } else { rank };
            for (weight, grid) in [(Weight::Gate, gate), (Weight::Up, gate), (Weight::Down, down)] {
                for (m, n) in (0..grid.0).flat_map(|m| (0..grid.1).map(move |n| (m, n))) {
                    let sum = run.summed.get(&(owner, expert as u32, weight as u8, m, n));
                    prop_assert_eq!(sum, Some(&expected));
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn every_task_runs_once_and_no_slot_is_filled_early(
        seed in any::<u64>(),
        tokens in proptest::collection::vec(0_usize..700, 1..=4),
        ranks_log in 0_u32..3,
        top_k in 1_usize..4,
        minibatch in 1_usize..4,
        ring in 1_usize..4,
        saved in 0_usize..2000,
        skew in 1_u64..9,
        shared in 0_usize..3,
        ring_holds in any::<bool>(),
    ) {
        let ranks = 1 << ranks_log;
        let mut shape = Shape::new(24, 40, 8, top_k);
        shape.shared = (shared > 0).then_some(Shared { intermediate: 16 + 24 * shared, output_gate: shared == 2 });
        let tokens: Vec<_> = (0..ranks).map(|r| tokens.get(r).copied().unwrap_or(0)).collect();
        let mut state = seed;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % n
        };
        // A skew of 1 sends everything to one expert; -1 now and then.
        let all: usize = tokens.iter().sum();
        let ids: Vec<i32> = (0..all * top_k).map(|_| next(skew.min(8) + 1) as i32 - 1).collect();
        let routing = Routing::new(&shape, &ids, &vec![1.0; ids.len()], &tokens).unwrap();
        let knobs = Knobs {
            minibatch_rows: minibatch * ROW_BLOCK,
            ring_rows: ring * minibatch * ROW_BLOCK,
            saved_rows: if saved > 1500 { Knobs::ALL } else { saved },
            ..Knobs::for_shape(&shape)
        };
        let tiles = Tiles { gate_up_n: 8, d_hidden_n: 24, hidden_n: 16, wgrad_m: 16, wgrad_n: 24 };
        let mut slots = vec![Slots::default(); ranks];
        check_pass(Pass::Forward, &shape, &knobs, &tiles, &routing, false, &mut slots, seed)?;
        if !ring_holds {
            // Another layer has used the ring since: only saved slots are still good.
            let schedules: Vec<_> = (0..ranks).map(|r| Schedule::new(&shape, &routing, r)).collect();
            for (r, p) in Program::all(Pass::Backward, &shape, &knobs, &tiles, &routing, &schedules, false).iter().enumerate() {
                slots[r].x.retain(|row, _| *row < p.saved_slot_rows());
                slots[r].g.retain(|row, _| *row < p.saved_slot_rows());
            }
        }
        check_pass(Pass::Backward, &shape, &knobs, &tiles, &routing, ring_holds, &mut slots, seed ^ 1)?;
    }
}

#[test]
fn defaults_are_allowed_for_published_shapes() {
    for (h, i, e, k) in [
        (2048, 1024, 64, 8),
        (4096, 14336, 8, 2),
        (7168, 2048, 384, 8),
        (2880, 2880, 32, 4),
        (2688, 1856, 128, 6),
    ] {
        let shape = Shape::new(h, i, e, k);
        shape.validate().unwrap();
        let knobs = Knobs::for_shape(&shape);
        println!("{h} x {i}: minibatch {} ring {}", knobs.minibatch_rows, knobs.ring_rows);
        knobs.validate().unwrap();
    }
}
