//! `kodkod train`: a byte-level MoE transformer, trained on a text and compared with byte n-gram models.
//!
//! 1. [`data`] splits the text and draws batches; [`params`] fills the variables from the seed;
//! 2. [`model`] is the transformer, on [`ops`] and on `kodkod_candle`'s MoE layer; [`optimizer`] is AdamW;
//! 3. [`checkpoint`] saves a run and takes it up again with the same bits;
//! 4. [`ngram`] is what it is compared with; [`report`] and [`plot`] tell the outcome.

mod checkpoint;
mod data;
mod model;
mod ngram;
mod ops;
mod optimizer;
mod params;
mod plot;
mod report;

use std::fmt::Display;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use kodkod::Precision;
use serde::{Deserialize, Serialize};

use crate::options::{KnobOptions, MachineOptions};
use checkpoint::{Checkpoint, History};
use data::Text;
use model::{Model, Sizes};
use optimizer::AdamW;
use params::Params;

/// Options of `kodkod train`.
///
/// Options that a checkpoint also has are not given defaults here: with --resume the checkpoint's are theirs.
#[derive(Debug, clap::Args)]
#[command(after_long_help = MORE_HELP)]
pub(crate) struct Args {
    /// Text to train on, any bytes; its last 5 % are held out [default: the sample in data/austen.txt]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Virtual ranks that share the experts: a divisor of --experts. Changes no bit of any loss
    #[arg(long, value_name = "N", default_value_t = 4)]
    ranks: usize,
    /// Steps of training; the learning rate falls towards the last [default: 650]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Seed of the first weights and of the batches [default: 1]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Folder for loss.svg, metrics.json and checkpoint.safetensors; made if missing
    #[arg(long, value_name = "DIR", default_value = "out/train")]
    out: PathBuf,
    /// Go on from a checkpoint, with its configuration and the same bits as without the break
    #[arg(long, value_name = "CHECKPOINT")]
    resume: Option<PathBuf>,
    /// Write the checkpoint every so many steps, beside the one at the end [default: a quarter of --steps]
    #[arg(long, value_name = "STEPS")]
    checkpoint_every: Option<usize>,
    /// Stop after this step, as if interrupted: --resume goes on from there
    #[arg(long, value_name = "STEP")]
    stop_at: Option<usize>,
    /// What the experts' rows and weights are rounded to [default: bf16]
    #[arg(long, value_enum)]
    precision: Option<PrecisionOption>,
    /// Sequences of a batch [default: 8]
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Bytes of a sequence [default: 128]
    #[arg(long, value_name = "BYTES")]
    context: Option<usize>,
    /// No progress
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    knobs: KnobOptions,
    #[command(flatten)]
    machine: MachineOptions,
}

const MORE_HELP: &str = "\
The model is a small transformer over bytes (RMSNorm, rotary attention, AdamW), in candle; its feed-forward blocks are \
kodkod's MoE layers, whose experts are spread over virtual ranks in this process. By default it trains for about \
two minutes on two cores, on five novels by Jane Austen, and holds the last 5 % of the text out.

At the end it prints, for the held-out text, the bits per byte of the model and of a byte bigram and a byte trigram \
model of the same training text, and each layer's load by expert. It writes to --out:
  loss.svg                the loss curve
  metrics.json            configuration, every step's loss with its exact bits, all final figures
  checkpoint.safetensors  weights, optimizer and position: --resume goes on with identical bits

Losses have the same bits for every --ranks, --threads, --isa and knob.

Examples:
  kodkod train
  kodkod train --text book.txt --steps 2000 --out out/book
  kodkod train --stop-at 100 && kodkod train --resume out/train/checkpoint.safetensors";

/// The model's sizes.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Model")]
struct ModelOptions {
    /// Width of a token's row [default: 128]
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,
    /// Blocks of attention and experts [default: 4]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Attention heads: --hidden / --heads must be even [default: 4]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Experts of a block [default: 8]
    #[arg(long, value_name = "N")]
    experts: Option<usize>,
    /// Experts that a token goes to [default: 2]
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Width inside an expert [default: 256]
    #[arg(long, value_name = "N")]
    intermediate: Option<usize>,
    /// Peak of the learning rate [default: 0.0025]
    #[arg(long, value_name = "RATE")]
    learning_rate: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PrecisionOption {
    Bf16,
    F32,
}

impl Display for PrecisionOption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PrecisionOption::Bf16 => "bf16",
            PrecisionOption::F32 => "f32",
        })
    }
}

/// Everything that a loss depends on: two runs of one configuration have the same losses, bit by bit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Config {
    sizes: Sizes,
    context: usize,
    batch: usize,
    steps: usize,
    seed: u64,
    precision: PrecisionOption,
    learning_rate: f64,
    text_bytes: usize,
    text_fingerprint: String,
}

/// Share of the balancing loss in what is minimised.
const BALANCE: f64 = 0.01;
/// Windows of one forward when no gradient is needed.
const EVALUATION_BATCH: usize = 32;
/// Held-out points of the loss curve, and windows of each.
const HELD_OUT_POINTS: usize = 10;
const HELD_OUT_WINDOWS: usize = 64;

impl Args {
    /// The configuration of the options and, where there is one, the checkpoint, which must not contradict.
    fn config(&self, text: &Text, checkpoint: Option<&Config>) -> Result<Config> {
        fn pick<T: PartialEq + Display>(
            name: &str,
            given: Option<T>,
            saved: Option<T>,
            default: T,
        ) -> Result<T> {
            match (given, saved) {
                (Some(given), Some(saved)) if given != saved => {
                    bail!(
                        "{name} is {given}: the checkpoint of --resume was trained with {saved}, leave the option out"
                    )
                }
                (_, Some(value)) | (Some(value), None) => Ok(value),
                (None, None) => Ok(default),
            }
        }
        let (c, m) = (checkpoint, &self.model);
        let s = c.map(|c| &c.sizes);
        let config = Config {
            sizes: Sizes {
                hidden: pick("--hidden", m.hidden, s.map(|s| s.hidden), 128)?,
                layers: pick("--layers", m.layers, s.map(|s| s.layers), 4)?,
                heads: pick("--heads", m.heads, s.map(|s| s.heads), 4)?,
                experts: pick("--experts", m.experts, s.map(|s| s.experts), 8)?,
                top_k: pick("--top-k", m.top_k, s.map(|s| s.top_k), 2)?,
                intermediate: pick("--intermediate", m.intermediate, s.map(|s| s.intermediate), 256)?,
            },
            context: self.context(c)?,
            batch: pick("--batch", self.batch, c.map(|c| c.batch), 8)?,
            steps: pick("--steps", self.steps, c.map(|c| c.steps), 650)?,
            seed: pick("--seed", self.seed, c.map(|c| c.seed), 1)?,
            precision: pick("--precision", self.precision, c.map(|c| c.precision), PrecisionOption::Bf16)?,
            learning_rate: pick("--learning-rate", m.learning_rate, c.map(|c| c.learning_rate), 0.0025)?,
            text_bytes: text.train().len() + text.held_out().len(),
            text_fingerprint: format!("{:016x}", text.fingerprint()),
        };
        if let Some(c) = c {
            let (ours, theirs) = (&config.text_fingerprint, &c.text_fingerprint);
            ensure!(
                ours == theirs && config.text_bytes == c.text_bytes,
                "--text is {} ({} bytes, fingerprint {ours}): the checkpoint of --resume was trained on another text \
                 ({} bytes, fingerprint {theirs})",
                text.name,
                config.text_bytes,
                c.text_bytes
            );
        }
        config.validate(self.ranks)?;
        Ok(config)
    }

    /// The context alone, which must be known to judge the text.
    fn context(&self, checkpoint: Option<&Config>) -> Result<usize> {
        let context = match (self.context, checkpoint.map(|c| c.context)) {
            (Some(given), Some(saved)) if given != saved => {
                bail!(
                    "--context is {given}: the checkpoint of --resume was trained with {saved}, leave the option out"
                )
            }
            (given, saved) => saved.or(given).unwrap_or(128),
        };
        ensure!((2..=4096).contains(&context), "--context is {context}: 2 to 4096 are allowed");
        Ok(context)
    }
}

impl Config {
    fn validate(&self, ranks: usize) -> Result<()> {
        let Sizes { hidden, layers, heads, experts, .. } = self.sizes;
        let within = |name: &str, value: usize, most: usize| {
            ensure!((1..=most).contains(&value), "{name} is {value}: 1 to {most} are allowed");
            Ok(())
        };
        within("--steps", self.steps, 1 << 24)?;
        within("--batch", self.batch, 4096)?;
        within("--layers", layers, 64)?;
        within("--heads", heads, hidden.max(1))?;
        within("--experts", experts, kodkod::Shape::MAX_EXPERTS)?;
        within("--ranks", ranks, experts)?;
        self.sizes.moe().validate().context("the model's sizes")?;
        within("--top-k", self.sizes.top_k, experts)?;
        ensure!(
            hidden.is_multiple_of(2 * heads),
            "--heads is {heads}: --hidden ({hidden}) must be a multiple of twice as many, since rotary positions turn pairs"
        );
        ensure!(
            experts.is_multiple_of(ranks),
            "--ranks is {ranks}: it must divide --experts ({experts}), as every rank holds as many experts"
        );
        // Each weight with its two moments, its gradient and what an update makes of it, in f32.
        let Sizes { intermediate, .. } = self.sizes;
        let weights = layers as f64 * hidden as f64 * (4 * hidden + 3 * experts * intermediate) as f64;
        if let Some(available) = crate::doctor::available_memory() {
            ensure!(
                weights * 20.0 <= available as f64,
                "the model has {:.1} G weights: they need about {:.0} GB to train, {:.1} GB are available; a smaller \
                 --hidden, --layers, --experts or --intermediate is needed",
                weights / 1e9,
                weights * 20.0 / 1e9,
                available as f64 / 1e9
            );
        }
        let rate = self.learning_rate;
        ensure!(rate > 0.0 && rate <= 1.0, "--learning-rate is {rate}: more than 0 and at most 1 is allowed");
        Ok(())
    }
}

/// Runs it.
pub(crate) fn run(args: Args) -> Result<ExitCode> {
    let started = Instant::now();
    keep_memory();
    let checkpoint = args.resume.as_deref().map(Checkpoint::read).transpose()?;
    let saved = checkpoint.as_ref().map(|c| &c.config);
    let text = Text::load(args.text.as_deref(), args.context(saved)?)?;
    let config = args.config(&text, saved)?;
    let last = args.stop_at.unwrap_or(config.steps);
    ensure!(
        (1..=config.steps).contains(&last),
        "--stop-at is {last}: 1 to --steps ({}) are allowed",
        config.steps
    );
    let every = args.checkpoint_every.unwrap_or(config.steps.div_ceil(4));
    ensure!(every > 0, "--checkpoint-every is 0: at least 1 is needed");
    let knobs = args.machine.knobs(&args.knobs, &config.sizes.moe(), args.ranks);
    knobs.validate().context("the knobs")?;
    args.machine.device.note_unused(args.ranks);
    let group = args.machine.group(args.ranks)?;
    prepare(&args.out)?;

    let params = Params::new(config.seed);
    let precision = match config.precision {
        PrecisionOption::Bf16 => Precision::Bf16,
        PrecisionOption::F32 => Precision::F32,
    };
    let model = Model::new(&config.sizes, &group, precision, knobs, params.builder())?;
    let mut run = Run { adam: AdamW::new(params.all()), history: History::default(), config, text, model };
    if let Some(checkpoint) = &checkpoint {
        run.history = checkpoint.restore(&mut run.adam)?;
    }
    let first = run.history.losses.len();
    ensure!(first <= last, "--stop-at is {last}: the checkpoint of --resume is at step {first} already");
    let parameters: usize = run.adam.slots.iter().map(|slot| slot.m.len()).sum();
    let (config, text) = (&run.config, &run.text);
    println!(
        "text    {}: {} bytes to train on, {} held out",
        text.name,
        text.train().len(),
        text.held_out().len()
    );
    println!(
        "model   {} parameters, {} active: {} layers of width {}, {} experts of width {}, top-{}, {}",
        parameters,
        active(&config.sizes, parameters),
        config.sizes.layers,
        config.sizes.hidden,
        config.sizes.experts,
        config.sizes.intermediate,
        config.sizes.top_k,
        config.precision
    );
    println!("machine {} ranks, {}", group.ranks(), group.description());
    println!(
        "steps   {} to {last} of {}, {} bytes each\n",
        first + 1,
        config.steps,
        config.batch * config.context
    );

    let checkpoint_path = args.out.join("checkpoint.safetensors");
    let progress = Progress::new(first, last, args.quiet);
    let trained = Instant::now();
    for step in first..last {
        let loss = run.step(step)?;
        let done = step + 1;
        if done % run.config.steps.div_ceil(HELD_OUT_POINTS) == 0 || done == last {
            let bits = run.held_out(Some(HELD_OUT_WINDOWS))?.0;
            run.history.held_out.push((done as u32, bits as f32));
        }
        let rate =
            ((done - first) * run.config.batch * run.config.context) as f64 / trained.elapsed().as_secs_f64();
        progress.step(done, loss, rate, run.history.held_out.last().map(|point| point.1));
        if done % every == 0 || done == last {
            checkpoint::write(&checkpoint_path, &run.config, &run.adam, &run.history)?;
        }
    }
    let train_seconds = trained.elapsed().as_secs_f64();
    progress.finish();
    if first == last {
        checkpoint::write(&checkpoint_path, &run.config, &run.adam, &run.history)?;
    }

    let (bits, load) = run.held_out(None)?;
    let Run { config, text, history, .. } = &run;
    let ngram = |order| {
        let whole = [text.train(), text.held_out()].concat();
        ngram::bits_per_byte(&whole, text.train().len(), order)
    };
    let bits_per_byte = report::BitsPerByte { model: bits, bigram: ngram(2), trigram: ngram(3) };
    let marks = [("bigram", bits_per_byte.bigram), ("trigram", bits_per_byte.trigram)];
    plot::draw(&args.out.join("loss.svg"), history, &marks)?;
    let metrics = report::Metrics {
        config,
        text: &text.name,
        train_bytes: text.train().len(),
        held_out_bytes: text.held_out().len(),
        parameters,
        ranks: group.ranks(),
        threads: group.threads(),
        isa: group.isa().map(|isa| isa.to_string()),
        steps_done: history.losses.len(),
        losses: &history.losses,
        losses_hex: report::hex(&history.losses),
        held_out_curve: &history.held_out,
        bits_per_byte,
        expert_load: &load,
        tokens_per_second: ((last - first) * config.batch * config.context) as f64 / train_seconds.max(1e-9),
        train_seconds,
        wall_seconds: started.elapsed().as_secs_f64(),
    };
    metrics.write(&args.out.join("metrics.json"))?;
    metrics.print();
    println!(
        "\n{:.0} s in all, {:.0} tokens/s in training. Wrote loss.svg, metrics.json and checkpoint.safetensors to {}",
        metrics.wall_seconds,
        metrics.tokens_per_second,
        args.out.display()
    );
    Ok(ExitCode::SUCCESS)
}

/// A run's state.
struct Run {
    config: Config,
    text: Text,
    model: Model,
    adam: AdamW,
    history: History,
}

impl Run {
    /// One step, from 0; returns its loss in nats per byte.
    fn step(&mut self, step: usize) -> Result<f32> {
        let Config { seed, batch, context, steps, learning_rate, .. } = self.config;
        let (inputs, targets) = self.text.batch(seed, step, batch, context);
        let (logits, balances) = self.model.forward(&inputs, batch)?;
        let loss = ops::cross_entropy(&logits, &targets)?;
        let share = BALANCE / balances.len() as f64;
        let mut total = loss.clone();
        for balance in &balances {
            total = (total + (&balance.loss * share)?)?;
        }
        let gradients = total.backward()?;
        self.adam.step(&gradients, optimizer::learning_rate(learning_rate, step, steps), step)?;
        let loss = loss.to_scalar()?;
        self.history.losses.push(loss);
        Ok(loss)
    }

    /// Bits per byte of the held-out text, or of a number of windows spread over it, and the experts' load by layer.
    fn held_out(&self, sample: Option<usize>) -> Result<(f64, Vec<Vec<u64>>)> {
        let context = self.config.context;
        let mut windows = self.text.held_out_windows(context);
        if let Some(sample) = sample {
            let stride = windows.len().div_ceil(sample).max(1);
            windows = windows.into_iter().step_by(stride).collect();
        }
        let mut load = vec![vec![0; self.config.sizes.experts]; self.config.sizes.layers];
        let (mut nats, mut bytes) = (0.0, 0);
        for batch in windows.chunks(EVALUATION_BATCH) {
            let (inputs, targets) = self.text.windows(batch.iter().map(|&(start, _)| start), context);
            let (logits, balances) = self.model.forward(&inputs, batch.len())?;
            let losses = ops::row_losses(&logits, &targets)?;
            for (losses, &(_, scored)) in losses.chunks_exact(context).zip(batch) {
                nats += losses[context - scored..].iter().map(|&l| f64::from(l)).sum::<f64>();
                bytes += scored;
            }
            for (sum, balance) in load.iter_mut().zip(&balances) {
                sum.iter_mut().zip(&balance.load).for_each(|(sum, &n)| *sum += u64::from(n));
            }
        }
        Ok((nats / bytes as f64 / std::f64::consts::LN_2, load))
    }
}

/// Parameters that one token meets.
fn active(sizes: &Sizes, parameters: usize) -> usize {
    let expert = 3 * sizes.hidden * sizes.intermediate;
    parameters - sizes.layers * (sizes.experts - sizes.top_k) * expert
}

/// Has glibc keep the memory that a step frees for the next step, which would else fault it in again page by page.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn keep_memory() {
    use std::ffi::c_int;
    unsafe extern "C" {
        fn mallopt(parameter: c_int, value: c_int) -> c_int;
    }
    const TRIM_THRESHOLD: c_int = -1;
    const MMAP_THRESHOLD: c_int = -3;
    for parameter in [TRIM_THRESHOLD, MMAP_THRESHOLD] {
        // SAFETY: mallopt takes its own lock and only changes when memory goes back to the system.
        unsafe { mallopt(parameter, c_int::MAX) };
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn keep_memory() {}

/// Makes the folder and sees that a file can be written there, before two minutes are spent.
fn prepare(out: &std::path::Path) -> Result<()> {
    let probe = out.join("checkpoint.safetensors.part");
    std::fs::create_dir_all(out)
        .and_then(|()| std::fs::write(&probe, b""))
        .and_then(|()| std::fs::remove_file(&probe))
        .with_context(|| format!("--out {}: a folder that can be written to is needed", out.display()))
}

/// A bar on a terminal, a line now and then elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    last: usize,
    started: Instant,
    first: usize,
    said: std::cell::Cell<Instant>,
    quiet: bool,
}

impl Progress {
    const LINE_EVERY: Duration = Duration::from_secs(10);

    fn new(first: usize, last: usize, quiet: bool) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(last as u64).with_position(first as u64);
            let style = "{bar:30.cyan/blue} step {pos}/{len}  {msg}  {elapsed} gone, {eta} left";
            bar.set_style(
                ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.reset_eta();
            bar
        });
        let now = Instant::now();
        Progress { bar, last, first, started: now, said: now.into(), quiet }
    }

    fn step(&self, done: usize, nats: f32, rate: f64, held_out: Option<f32>) {
        let bits = f64::from(nats) / std::f64::consts::LN_2;
        let held_out = held_out.map_or(String::new(), |b| format!(", held out {b:.3}"));
        let message = format!("loss {bits:.3} bits/byte{held_out}  {rate:.0} tokens/s");
        match &self.bar {
            Some(bar) => {
                bar.set_message(message);
                bar.set_position(done as u64);
            }
            None if self.quiet => {}
            None => {
                if self.said.get().elapsed() >= Self::LINE_EVERY
                    || done == self.last
                    || done == self.first + 1
                {
                    self.said.set(Instant::now());
                    let gone = self.started.elapsed().as_secs_f64();
                    let left = gone / (done - self.first) as f64 * (self.last - done) as f64;
                    eprintln!("step {done}/{}  {message}  {gone:.0} s gone, {left:.0} s left", self.last);
                }
            }
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
