//! The command `kodkod`: one module a subcommand, each with its `Args` and its `run`.
//!
//! Exit status: 0 when all went well, 1 when a check missed, 2 for bad input or a failure.

/// The standard library's, but where nothing can be written, as on a full disk, it ends the command with an error
/// instead of a panic. All modules below use it.
#[cfg(not(test))]
macro_rules! println {
    ($($text:tt)*) => { $crate::print_line(format_args!($($text)*)) };
}

/// The same for what is said beside the output: where it cannot be written, nobody is told.
#[cfg(not(test))]
macro_rules! eprintln {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod bench;
mod check;
mod doctor;
mod inputs;
mod on_gpus;
mod options;
mod replay;
mod shapes;
mod step;
mod trace;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A deterministic, fused mixture-of-experts training layer with expert parallelism.
#[derive(Parser)]
#[command(name = "kodkod", version, about, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a byte-level MoE transformer on a text, and compare it with byte n-gram models
    Train(train::Args),
    /// Time the layer's forward and backward over shapes, tokens and ranks, beside the dense GEMM rate
    Bench(bench::Args),
    /// Time every task of one forward and one backward on a GPU, for Perfetto and as an SVG timeline
    Trace(trace::Args),
    /// Hold the layer against an f64 reference and against its contract of bits
    Check(check::Args),
    /// Run one MoE step from a safetensors file, forward and, where `dy` is given, backward
    Replay(replay::Args),
    /// Say what this machine offers and what kodkod will use
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    end_on_closed_pipe();
    // A help that is asked for is an error too, with status 0; it counts only if somebody could read it.
    let command = Cli::try_parse().map(|cli| cli.command).unwrap_or_else(|text| match text.print() {
        Ok(()) => std::process::exit(text.exit_code()),
        Err(error) => end_without_output(&error),
    });
    let result = match command {
        Command::Train(args) => train::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Check(args) => check::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Doctor(args) => doctor::run(args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(2)
    })
}

#[cfg(not(test))]
fn print_line(text: std::fmt::Arguments) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush()) {
        end_without_output(&error);
    }
}

fn end_without_output(error: &std::io::Error) -> ! {
    eprintln!("error: standard output: {error}");
    std::process::exit(2)
}

/// A reader that leaves early (`| head`) ends the command without a word, as it does with others.
#[cfg(unix)]
fn end_on_closed_pipe() {
    use std::ffi::c_int;
    unsafe extern "C" {
        fn signal(signal: c_int, handler: usize) -> usize;
    }
    const SIGPIPE: c_int = 13;
    const DEFAULT: usize = 0;
    // SAFETY: sets a signal back to its default before any thread is started.
    unsafe { signal(SIGPIPE, DEFAULT) };
}

#[cfg(not(unix))]
fn end_on_closed_pipe() {}
