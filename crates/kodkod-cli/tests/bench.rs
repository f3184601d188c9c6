//! `kodkod bench` from outside: its lines, its figures' arithmetic, its memory claim, its errors.

use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kodkod")).arg("bench").args(args).output().expect("kodkod runs")
}

fn lines(args: &[&str]) -> Vec<Value> {
    let output = bench(args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{err}");
    println!("{out}");
    out.lines().map(|line| serde_json::from_str(line).expect("every line is JSON")).collect()
}

const TINY: [&str; 6] = ["--shape", "64x32x4x2", "--dense-size", "64", "--repeat", "2"];

#[test]
fn one_object_a_line_with_flops_that_add_up() {
    let rows = lines(&[&TINY[..], &["--tokens", "16,40", "--ranks", "1,2", "--json"]].concat());
    assert_eq!(rows.len(), 2 * 2 * 3, "tokens x ranks x passes");
    for row in &rows {
        for key in ["device", "ranks", "shape", "tokens_per_rank", "pass", "ms", "tflops", "dense_tflops"] {
            assert!(!row[key].is_null(), "{key} is missing in {row}");
        }
        let number = |key: &str| row[key].as_f64().unwrap();
        let passes = match row["pass"].as_str().unwrap() {
            "fwd" => 1.0,
            "bwd" => 2.0,
            "fwd+bwd" => 3.0,
            other => panic!("pass {other}"),
        };
        let flops = passes * 6.0 * 64.0 * 32.0 * 2.0 * number("ranks") * number("tokens_per_rank");
        let said = number("tflops") * 1e12 * number("ms") / 1e3;
        assert!((said / flops - 1.0).abs() < 1e-9, "{said} FLOPs for {flops} in {row}");
        assert!((number("fraction_of_dense") * number("dense_tflops") / number("tflops") - 1.0).abs() < 1e-9);
    }
    assert_eq!((&rows[0]["shape"], &rows[0]["device"]), (&"64x32x4x2".into(), &"cpu".into()));
}

#[test]
fn the_table_has_a_row_a_pass() {
    let output = bench(
        &[&TINY[..], &["--tokens", "16", "--ranks", "2", "--pass", "fwd", "--precision", "f32"]].concat(),
    );
    let out = String::from_utf8_lossy(&output.stdout);
    println!("{out}");
    assert!(output.status.success());
    assert_eq!(out.lines().filter(|line| line.contains("64x32x4x2") && line.contains("fwd")).count(), 1);
}

#[test]
fn gradients_are_stored_in_either_type() {
    for gradients in ["f32", "bf16"] {
        let args =
            [&TINY[..], &["--tokens", "16", "--ranks", "2", "--pass", "bwd", "--gradients", gradients]]
                .concat();
        let rows = lines(&[&args[..], &["--json"]].concat());
        assert_eq!((rows.len(), &rows[0]["gradients"]), (1, &gradients.into()));
        let out = bench(&args).stdout;
        let out = String::from_utf8_lossy(&out);
        assert!(out.contains(&format!("gradients in {gradients}")), "{out}");
    }
    let err = bench(&["--memory", "--gradients", "bf16"]).stderr;
    let err = String::from_utf8_lossy(&err);
    println!("{err}");
    assert!(err.contains("--gradients bf16"), "{err}");
}

/// Beyond the slots that rows are pushed to, the peak of symmetric memory follows ring and saved rows, not tokens.
#[test]
fn memory_follows_the_ring_not_the_tokens() {
    let sizes = ["--memory", "--shape", "256x128x8x4", "--tokens", "256,512,1024", "--ranks", "2", "--json"];
    let rest = |extra: &[&str]| -> Vec<f64> {
        let rows = lines(&[&sizes[..], extra].concat());
        rows.iter().map(|row| row["rest_bytes"].as_f64().unwrap()).collect()
    };
    let replayed = rest(&["--saved-rows", "0"]);
    for bytes in &replayed {
        let change = bytes / replayed[0];
        assert!((0.95..1.05).contains(&change), "the rest changed by {change} while the tokens quadrupled");
    }
    let longer_ring = rest(&["--saved-rows", "0", "--ring-rows", "512"]);
    let growth = longer_ring[2] / replayed[2];
    assert!((1.8..2.2).contains(&growth), "a ring twice as long takes {growth} times the rest");
    // x, g, u of 512 rows on each of two ranks.
    let saved = rest(&["--saved-rows", "512"]);
    let (more, rows) = (saved[2] - replayed[2], (2 * 512 * (256 + 2 * 128) * 2) as f64);
    assert!((0.95..1.05).contains(&(more / rows)), "512 saved rows take {more} bytes, expected {rows}");
}

#[test]
fn bad_input_is_named_with_what_is_allowed() {
    for (args, value, allowed) in [
        (&["--shape", "olmo"][..], "olmo", "olmoe-1b-7b"),
        (&["--shape", "60x32x4x2"], "60", "multiple of 8"),
        (&["--shape", "64x32x4x2", "--ranks", "3"], "3", "divide the number of experts (4)"),
        (&["--ranks", "0"], "0", "1 to"),
        (&["--tokens", "0"], "0", "1 to"),
        (&["--repeat", "0"], "0", "1 to"),
        (&["--pass", "sideways"], "sideways", "fwd+bwd"),
        (&["--minibatch-rows", "100"], "100", "multiple of 128"),
        (&["--isa", "mmx"], "mmx", "scalar"),
        (&["--precision", "fp4"], "fp4", "bf16"),
        (&["--device", "cuda:x"], "cuda:x", "cuda:N"),
        (&["--device", "cuda", "--precision", "f32"], "f32", "--device cpu"),
        (&["--device", "cuda", "--memory"], "--memory", "--device cpu"),
        (&["--device", "cuda:999"], "cuda", "--device cpu"),
        (&["--dense-tflops", "700"], "--dense-tflops", "GPU"),
        (&["--links", "--devices", "0,1,2"], "3 GPUs", "two ends"),
        (&["--links", "--devices", "0,x"], "x", "--devices"),
        (&["--links", "--repeat", "0"], "0", "1 to"),
        (&["--links", "--device", "cuda:1"], "cuda:1", "--devices"),
        (&["--links", "--devices", "999"], "GPUs 999 and 999", "--device cpu"),
    ] {
        let output = bench(args);
        let err = String::from_utf8_lossy(&output.stderr);
        println!("{args:?}: {err}");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(err.contains(value) && err.contains(allowed), "{args:?}");
    }
}
