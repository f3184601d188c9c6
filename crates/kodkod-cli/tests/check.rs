//! `kodkod check` end to end: it passes here, says what it did, and its options do what they say.

use std::process::{Command, Output};

fn check(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kodkod")).arg("check").args(args).output().expect("it runs")
}

fn rows(output: &Output) -> Vec<serde_json::Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line")).collect()
}

#[test]
fn quick_passes_and_covers_every_case() {
    let output = check(&["--quick", "--json"]);
    let rows = rows(&output);
    for row in &rows {
        println!("{row}");
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(rows.iter().all(|row| row["passed"] == true));
    for case in 1..=18 {
        let name = format!("case-{case:02} ");
        assert!(
            rows.iter().any(|row| row["name"].as_str().is_some_and(|n| n.starts_with(&name))),
            "no {name}"
        );
    }
    for (precision, tolerance) in [("bf16", 0.01), ("f32", 1e-5)] {
        let errors = rows.iter().filter(|row| row["precision"] == precision);
        let errors: Vec<_> = errors.filter_map(|row| row["worst_error"].as_f64()).collect();
        let worst = errors.iter().copied().fold(0.0, f64::max);
        println!("{precision}: {} inputs, largest error {worst:.2e}", errors.len());
        assert!(errors.len() > 20 && worst > 0.0 && worst <= tolerance);
    }
}

#[test]
fn filter_seed_and_cases_choose_rows() {
    let output = check(&["--filter", "random, seed", "--seed", "1000", "--cases", "3", "--json"]);
    let names: Vec<_> =
        rows(&output).iter().map(|row| row["name"].as_str().expect("a name").to_owned()).collect();
    let expected =
        ["1000", "1001", "1002", "1000", "1001", "1002"].map(|seed| format!("random, seed {seed}"));
    assert_eq!(names, expected);
    let table = check(&["--filter", "case-08"]);
    assert!(table.status.success() && String::from_utf8_lossy(&table.stdout).contains("1 of 1 rows right"));
    // Without a terminal each row is named when it begins, and again with its result when it ends.
    let log = String::from_utf8_lossy(&table.stderr);
    println!("{log}");
    let name = "[1/1] case-08 expert ids that do not exist (-)";
    let lines: Vec<_> = log.lines().collect();
    assert!(lines.len() == 2 && lines[0] == name && lines[1].starts_with(&format!("{name}: ok, 4 runs, ")));
}

#[test]
fn a_filter_that_no_row_has_is_bad_input() {
    let output = check(&["--filter", "no such row"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no such row"));
}

/// Where there is a GPU this runs on it.
#[test]
fn a_gpu_or_what_is_missing_for_one() {
    let output = check(&["--device", "cuda", "--filter", "case-06"]);
    let err = String::from_utf8_lossy(&output.stderr);
    println!("{err}");
    match output.status.code() {
        Some(0) => assert!(String::from_utf8_lossy(&output.stdout).contains("1 of 1 rows right")),
        Some(2) => assert!(["NVRTC", "--device cpu"].iter().any(|word| err.contains(word)), "{err}"),
        other => panic!("exit status {other:?}"),
    }
}
