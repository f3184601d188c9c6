//! `kodkod trace` from outside: on a GPU its files and figures; everywhere its errors.

use std::process::{Command, Output};

use serde_json::Value;

fn trace(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kodkod")).arg("trace").args(args).output().expect("kodkod runs")
}

/// Where there is a GPU this runs on it.
#[test]
fn a_trace_and_a_timeline_or_what_is_missing_for_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("a.json");
    let out = out.to_str().expect("UTF-8");
    let output =
        trace(&["--shape", "256x128x8x2", "--tokens", "500", "--ranks", "2", "--json", "--out", out]);
    let (said, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{said}{err}");
    let files = std::fs::read_dir(folder.path()).expect("the folder").count();
    if output.status.code() == Some(2) {
        assert!(["NVRTC", "--device cpu"].iter().any(|word| err.contains(word)), "{err}");
        assert!(said.is_empty() && files == 0, "a run that failed leaves no file");
        return;
    }
    assert!(output.status.success() && files == 2, "a trace and a timeline");
    let report: Value = serde_json::from_str(&said).expect("one JSON object");
    let written: Value =
        serde_json::from_str(&std::fs::read_to_string(out).expect("the trace")).expect("JSON");
    let events = written["traceEvents"].as_array().expect("a list");
    for pass in report["passes"].as_array().expect("a list") {
        assert!(pass["ms"].as_f64() > Some(0.0) && pass["idle"].as_f64() < Some(1.0));
        assert!(
            !pass["tasks"].as_array().expect("a list").is_empty(),
            "a {} pass without tasks",
            pass["pass"]
        );
    }
    let number = |kind: &str| events.iter().filter(|e| e["name"] == kind).count() as u64;
    assert_eq!(
        report["passes"][0]["tasks"].as_array().map(|tasks| {
            let down = tasks.iter().find(|t| t["kind"] == "Down").expect("a forward has Down");
            down["tasks"].as_u64().expect("a number")
        }),
        Some(number("Down")),
        "only forwards have Down"
    );
}

#[test]
fn bad_input_is_named_with_what_is_allowed() {
    for (args, value, allowed) in [
        (&["--shape", "olmo"][..], "olmo", "olmoe-1b-7b"),
        (&["--shape", "64x64x4x2", "--ranks", "3"], "3", "divide the number of experts (4)"),
        (&["--shape", "64x32x4x2", "--compile-only"], "32", "multiple of 64"),
        (&["--ranks", "0"], "0", "1"),
        (&["--tokens", "0"], "--tokens 0", "1 to"),
        (&["--device", "cpu"], "--device cpu", "cuda:N"),
        (&["--device", "cuda:x"], "cuda:x", "cuda:N"),
        (&["--device", "cuda:999"], "cuda", "--device cpu"),
        (&["--gradients", "fp8"], "fp8", "bf16"),
        (&["--minibatch-rows", "100"], "100", "multiple of 128"),
        (&["--fwd-comm-sms", "0"], "fwd_comm_sms is 0", "1 to"),
        (&["--out", "/no/such/folder/a.json"], "--out /no/such/folder/a.json", "a folder that exists"),
        (&["--out", "/proc/a.json"], "--out /proc/a.json", "can be written to"),
        (&["--out", "a.svg"], "--out a.svg", ".json"),
        (&["--out", "."], "--out .", ".json"),
    ] {
        let output = trace(args);
        let err = String::from_utf8_lossy(&output.stderr);
        println!("{args:?}: {err}");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(err.contains(value) && err.contains(allowed) && !err.contains("panicked"), "{args:?}");
    }
}
