//! `kodkod bench --links`: what the link between two GPUs gives to copies as the passes make them, and how long a flag takes.

use std::process::ExitCode;

use anyhow::{Context, bail};
use comfy_table::{Table, presets};
use kodkod::cuda::jit;
use kodkod::cuda::links::{Links, RoundTrip, Transfer};
use serde::Serialize;

use super::{Args, progress, right_align};

/// SMs of one direction, as far as there are so many; all of them come last.
const SMS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// One line of `--json`.
#[derive(Serialize)]
struct Row {
    devices: [usize; 2],
    transfer: &'static str,
    both_ways: bool,
    sms: u32,
    /// Bytes of a bulk copy, or of what a warp stores in lines at once.
    piece_bytes: u32,
    /// 10^9 bytes a second in each direction.
    gb_per_s: f64,
}

/// The last line.
#[derive(Serialize)]
struct Flag {
    devices: [usize; 2],
    gpus: [String; 2],
    round_trip_ns: f64,
    least_round_trip_ns: f64,
    round_trips: usize,
}

fn name(transfer: Transfer) -> &'static str {
    match transfer {
        Transfer::Pull => "pull",
        Transfer::PushBulk => "push-bulk",
        Transfer::PushLines => "push-lines",
    }
}

pub(super) fn measure(args: &Args) -> anyhow::Result<ExitCode> {
    if args.compile_only {
        jit::cubin(jit::Source::Links, &[])?;
        return Ok(ExitCode::SUCCESS);
    }
    let devices = match args.devices[..] {
        [] => [0, 1],
        [only] => [only; 2],
        [first, second] => [first, second],
        _ => bail!("--devices with {} GPUs: a link has two ends", args.devices.len()),
    };
    let repeat = args.repeat.unwrap_or(5);
    if repeat == 0 || repeat > 1 << 14 {
        bail!("--repeat {repeat}: 1 to {} are allowed", 1 << 14);
    }
    let links = Links::new(devices)
        .with_context(|| format!("--links between GPUs {} and {}", devices[0], devices[1]))?;
    // (transfer, both ways, SMs, bytes of a piece)
    let mut points = Vec::new();
    for transfer in Transfer::ALL {
        for both_ways in [false, true] {
            let most = links.sms(both_ways);
            for sms in SMS.into_iter().filter(|&sms| sms < most).chain([most]) {
                points.extend(transfer.pieces().iter().map(|&piece| (transfer, both_ways, sms, piece)));
            }
        }
    }
    let bar = progress(points.len() + 1);
    bar.set_message("flag");
    let flag = links.round_trip()?;
    bar.inc(1);
    let mut rows = Vec::new();
    for (transfer, both_ways, sms, piece) in points {
        bar.set_message(name(transfer));
        let gb_per_s = links.rate(transfer, both_ways, sms, piece, repeat)?;
        let row = Row { devices, transfer: name(transfer), both_ways, sms, piece_bytes: piece, gb_per_s };
        if args.json {
            let line = serde_json::to_string(&row)?;
            bar.suspend(|| println!("{line}"));
        }
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let [first, second] = links.names();
    let RoundTrip { median_ns, least_ns, rounds } = flag;
    if args.json {
        let flag = Flag {
            devices,
            gpus: [first.into(), second.into()],
            round_trip_ns: median_ns,
            least_round_trip_ns: least_ns,
            round_trips: rounds,
        };
        println!("{}", serde_json::to_string(&flag)?);
        return Ok(ExitCode::SUCCESS);
    }
    println!("GPU {}: {first}; GPU {}: {second}", devices[0], devices[1]);
    println!("a flag there and back: median {median_ns:.0} ns, least {least_ns:.0} ns, of {rounds}");
    println!("GB/s in each direction, by SMs and bytes of a piece; medians of {repeat} launches");
    for transfer in Transfer::ALL {
        for both_ways in [false, true] {
            println!("{}, {}", name(transfer), if both_ways { "both ways at once" } else { "one way" });
            println!("{}", table(transfer, both_ways, &rows));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A row for each number of SMs, a column for each size of a piece.
fn table(transfer: Transfer, both_ways: bool, rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let pieces = transfer.pieces();
    table.set_header([String::from("SMs")].into_iter().chain(pieces.iter().map(u32::to_string)));
    let rows: Vec<_> =
        rows.iter().filter(|r| r.transfer == name(transfer) && r.both_ways == both_ways).collect();
    for of_sms in rows.chunk_by(|a, b| a.sms == b.sms) {
        let rates = of_sms.iter().map(|r| format!("{:.1}", r.gb_per_s));
        table.add_row([of_sms[0].sms.to_string()].into_iter().chain(rates));
    }
    right_align(&mut table, 0);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_row_for_each_number_of_sms() {
        let row = |both_ways, sms, piece_bytes| Row {
            devices: [0, 1],
            transfer: "pull",
            both_ways,
            sms,
            piece_bytes,
            gb_per_s: f64::from(sms * piece_bytes) / 1e3,
        };
        let rows: Vec<_> = [(false, 1), (false, 8), (true, 8)]
            .into_iter()
            .flat_map(|(both, sms)| Transfer::Pull.pieces().iter().map(move |&piece| row(both, sms, piece)))
            .collect();
        let text = table(Transfer::Pull, false, &rows).to_string();
        println!("{text}");
        let lines: Vec<_> = text.lines().filter(|l| l.contains(".5") || l.contains(".1")).collect();
        assert_eq!(lines.len(), 2, "one way has 1 and 8 SMs");
        assert!(lines[1].contains("32.8") && lines[1].contains("131.1"), "8 SMs: 4096 and 16384 bytes");
    }
}
