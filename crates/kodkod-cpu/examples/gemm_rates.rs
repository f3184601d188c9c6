//! Rates of the GEMM micro-kernels at the sizes that the layer calls them with, packing included.
//!
//! ```sh
//! cargo run --release -p kodkod-cpu --example gemm_rates -- [isa] [threads] [bf16|f32]
//! ```
//!
//! - `dense`: 2048 x 2048 x 2048, A Bᵀ;
//! - `nt`, `nn`: 64 rows against 256 columns and k = 2048 of weights that are read from memory once;
//! - `tn`: a 256 x 2048 tile of a weight gradient over 64 rows, written to memory once; `tn+` adds to it;
//! - `fill`: plain stores to the same memory.
//!
//! The median of the passes is printed, with the range in brackets.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use half::bf16;
use kodkod_cpu::gemm::{Element, Isa, Scratch, dense, gemm_nn, gemm_nt, gemm_tn};

/// Bytes of weights, or of gradients, that one pass goes through: far more than any cache.
const STREAM: usize = 800 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let isa = args.first().map_or(Ok(Isa::best()), |name| name.parse())?;
    let threads = args.get(1).map_or(Ok(2), |n| n.parse())?;
    match args.get(2).map_or("bf16", String::as_str) {
        "bf16" => rates(isa, threads, bf16::from_f32),
        "f32" => rates(isa, threads, |x| x),
        other => return Err(format!("no element type {other:?}: bf16 or f32").into()),
    }
    Ok(())
}

fn random<T>(len: usize, from: fn(f32) -> T) -> Vec<T> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        from((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

/// Times `pass` and prints its rate and, if it moves `bytes` to or from memory, that rate.
fn report(name: &str, flops: f64, bytes: f64, repeats: usize, mut pass: impl FnMut()) {
    pass();
    let mut seconds: Vec<f64> = (0..repeats)
        .map(|_| {
            let start = Instant::now();
            pass();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let (median, best, worst) = (seconds[repeats / 2], seconds[0], seconds[repeats - 1]);
    print!("{name:6}");
    if flops > 0.0 {
        let rate = |s: f64| flops / s / 1e9;
        print!(" {:6.1} GFLOP/s  [{:.1}, {:.1}]", rate(median), rate(worst), rate(best));
    }
    if bytes > 0.0 {
        print!("  {:.1} GB/s", bytes / median / 1e9);
    }
    println!();
}

/// Runs `task(i, scratch)` for all i on `threads` threads, handing indices out in order.
fn parallel(threads: usize, tasks: usize, task: impl Fn(usize, &mut Scratch) + Sync) {
    let ticket = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut scratch = Scratch::new();
                loop {
                    let i = ticket.fetch_add(1, Ordering::Relaxed);
                    if i >= tasks {
                        return;
                    }
                    task(i, &mut scratch);
                }
            });
        }
    });
}

#[derive(Clone, Copy)]
struct Out(*mut f32);
// SAFETY: tasks write disjoint tiles.
unsafe impl Sync for Out {}

fn rates<T: Element>(isa: Isa, threads: usize, from: fn(f32) -> T) {
    println!("{isa}, {threads} threads, {}", std::any::type_name::<T>());
    {
        let d = 2048;
        let (a, b) = (random(d * d, from), random(d * d, from));
        let mut c = vec![0.0; d * d];
        report("dense", 2.0 * (d * d * d) as f64, 0.0, 9, || dense(isa, threads, d, d, d, &a, &b, &mut c));
    }

    let (m, n, k) = (64, 256, 2048);
    let size = size_of::<T>();
    let x = random(m * k, from);
    {
        let tasks = STREAM / (n * k * size);
        let weights = random(tasks * n * k, from);
        let mut c = vec![0.0; tasks * m * n];
        let out = Out(c.as_mut_ptr());
        let flops = 2.0 * (tasks * m * n * k) as f64;
        let bytes = (tasks * n * k * size) as f64;
        report("nt", flops, bytes, 5, || {
            parallel(threads, tasks, |i, scratch| {
                let out = &out;
                // SAFETY: task i reads its own weights and writes its own m x n of C.
                unsafe {
                    let (w, c) = (weights.as_ptr().add(i * n * k), out.0.add(i * m * n));
                    gemm_nt(isa, scratch, m, n, k, x.as_ptr(), k, w, k, c, n, false);
                }
            })
        });
        // The same weights as matrices [k, 2048], each cut into 8 tiles of 256 columns.
        let width = 8 * n;
        let tasks = tasks / 8 * 8;
        let flops = 2.0 * (tasks * m * n * k) as f64;
        let bytes = (tasks * n * k * size) as f64;
        report("nn", flops, bytes, 5, || {
            parallel(threads, tasks, |i, scratch| {
                let out = &out;
                // SAFETY: as above; the tile's columns are inside its matrix.
                unsafe {
                    let w = weights.as_ptr().add(i / 8 * k * width + i % 8 * n);
                    gemm_nn(isa, scratch, m, n, k, x.as_ptr(), k, w, width, out.0.add(i * m * n), n, false);
                }
            })
        });
    }

    let (m, n, k) = (256, 2048, 64);
    let tasks = STREAM / (m * n * 4);
    let (dy, x) = (random(k * m, from), random(k * n, from));
    let mut c = vec![0f32; tasks * m * n + 16];
    let shift = c.as_ptr().align_offset(64);
    let out = Out(c[shift..].as_mut_ptr());
    for (name, accumulate) in [("tn", false), ("tn+", true)] {
        let flops = 2.0 * (tasks * m * n * k) as f64;
        let bytes = (tasks * m * n * 4) as f64 * if accumulate { 2.0 } else { 1.0 };
        report(name, flops, bytes, 5, || {
            parallel(threads, tasks, |i, scratch| {
                let out = &out;
                // SAFETY: task i writes its own m x n of C.
                unsafe {
                    let c = out.0.add(i * m * n);
                    gemm_tn(isa, scratch, m, n, k, dy.as_ptr(), m, x.as_ptr(), n, c, n, accumulate);
                }
            })
        });
    }
    let bytes = (tasks * m * n * 4) as f64;
    report("fill", 0.0, bytes, 5, || {
        parallel(threads, tasks, |i, _| {
            let out = &out;
            // SAFETY: task i writes its own m x n of C.
            unsafe { std::slice::from_raw_parts_mut(out.0.add(i * m * n), m * n).fill(1.0) };
        })
    });
}
