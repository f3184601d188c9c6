//! `kodkod doctor` from outside.

use std::process::{Command, Output};

use serde_json::Value;

fn doctor(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kodkod")).arg("doctor").args(args).output().expect("kodkod runs")
}

#[test]
fn says_what_is_there_and_passes_its_own_test() {
    let output = doctor(&["--json", "--threads", "2"]);
    let out = String::from_utf8_lossy(&output.stdout);
    println!("{out}");
    assert_eq!(output.status.code(), Some(0));
    let report: Value = serde_json::from_str(&out).expect("one JSON object");
    assert_eq!(
        (&report["ok"], &report["device"], &report["threads"]),
        (&true.into(), &"cpu".into(), &2.into())
    );
    assert!(report["cores"].as_u64().unwrap() >= 1);
    let levels = report["instruction_sets"].as_array().unwrap();
    assert!(levels.iter().any(|level| level["name"] == "scalar"));
    assert!(levels.iter().all(|level| level["dense_tflops"].as_f64().unwrap() > 0.0));
    assert!(report["cuda"]["driver"].is_boolean() && report["cuda"]["gpus"].is_array());
    let missing = &report["cuda"]["error"];
    assert_eq!(missing.is_null(), !report["cuda"]["gpus"].as_array().unwrap().is_empty(), "{missing}");
    assert!(report["self_test"].as_array().unwrap().len() >= 3);
}

#[test]
fn the_text_names_what_will_be_used() {
    let output = doctor(&["--isa", "scalar"]);
    let out = String::from_utf8_lossy(&output.stdout);
    println!("{out}");
    assert_eq!(output.status.code(), Some(0));
    assert!(
        out.contains("instruction set    scalar") && out.contains("CUDA driver") && out.contains("NVRTC")
    );
}
