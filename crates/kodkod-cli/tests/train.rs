//! `kodkod train`: the same bits for every rank count and over a break, the files it writes, and what it refuses.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A folder with a text of a few thousand bytes in it.
struct Place {
    dir: tempfile::TempDir,
}

const TINY: &str =
    "--hidden 16 --layers 2 --heads 2 --experts 4 --intermediate 16 --context 16 --batch 4 --threads 2";

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let words = ["the cat ", "sat on ", "a mat, ", "and then ", "the dog ", "came in.\n"];
        let text: String = (0..1500_usize).map(|i| words[i * i * 7 % 11 % words.len()]).collect();
        std::fs::write(dir.path().join("text.txt"), text).expect("a text");
        Place { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `kodkod train` on the text with the options of a tiny model and more.
    fn train(&self, options: &str) -> Output {
        self.run(&format!("{TINY} --text text.txt {options}"))
    }

    fn run(&self, options: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_kodkod"))
            .arg("train")
            .args(options.split_whitespace())
            .current_dir(&self.dir)
            .output()
            .expect("the command starts")
    }

    /// Runs it, which must go well, and reads `metrics.json`.
    fn metrics(&self, options: &str, out: &str) -> Value {
        let output = self.train(&format!("{options} --out {out}"));
        assert!(output.status.success(), "{options}: {}", String::from_utf8_lossy(&output.stderr));
        read(&self.path(out).join("metrics.json"))
    }

    /// Runs it, which must be refused.
    fn refuses(&self, options: &str, words: &[&str]) {
        refused(&self.train(options), words);
    }
}

/// The command failed with status 2 and a message that holds all the words.
fn refused(output: &Output, words: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr);
    println!("{message}");
    assert_eq!(output.status.code(), Some(2), "{message}");
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
    assert!(!message.contains("panicked"), "{message}");
}

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

fn losses(metrics: &Value) -> Vec<String> {
    let losses = metrics["losses_hex"].as_array().expect("losses");
    losses.iter().map(|bits| bits.as_str().expect("hex").to_string()).collect()
}

#[test]
fn losses_have_the_same_bits_for_every_rank_count_and_knob() {
    let place = Place::new();
    for precision in ["bf16", "f32"] {
        let one = place.metrics(&format!("--steps 6 --precision {precision} --ranks 1"), "one");
        println!("{precision}: {:?}", losses(&one));
        assert_eq!(losses(&one).len(), 6);
        for more in [
            "--ranks 1",
            "--ranks 2",
            "--ranks 4",
            "--ranks 2 --minibatch-rows 128 --ring-rows 128 --saved-rows 0",
        ] {
            let other = place.metrics(&format!("--steps 6 --precision {precision} {more}"), "other");
            assert_eq!(losses(&one), losses(&other), "{precision}, {more}");
            for same in ["losses", "held_out_curve", "expert_load", "bits_per_byte"] {
                assert_eq!(one[same], other[same], "{precision}, {more}: {same}");
            }
        }
    }
    let (one, other) = (place.metrics("--steps 3", "one"), place.metrics("--steps 3 --seed 2", "other"));
    assert_ne!(losses(&one)[0], losses(&other)[0], "the seed changes the first loss");
}

#[test]
fn a_resumed_run_ends_with_the_same_bits() {
    let place = Place::new();
    let whole = place.metrics("--steps 9 --ranks 4", "whole");
    let part = place.metrics("--steps 9 --ranks 4 --stop-at 4", "part");
    assert_eq!(losses(&part), losses(&whole)[..4]);
    // Everything else comes from the checkpoint; the ranks are this run's.
    let resume = "--resume part/checkpoint.safetensors";
    let output = place.run(&format!("{resume} --text text.txt --ranks 2 --out rest"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rest = read(&place.path("rest/metrics.json"));
    assert_eq!(losses(&rest), losses(&whole));
    assert_eq!(rest["bits_per_byte"], whole["bits_per_byte"]);
    let state =
        |run: &str| std::fs::read(place.path(run).join("checkpoint.safetensors")).expect("a checkpoint");
    let (a, b) = (state("rest"), state("whole"));
    let tensors = |bytes: &[u8]| -> Vec<(String, Vec<u8>)> {
        let file = safetensors::SafeTensors::deserialize(bytes).expect("safetensors");
        let mut all: Vec<_> =
            file.iter().map(|(name, view)| (name.to_string(), view.data().to_vec())).collect();
        all.sort();
        all
    };
    let (a, b) = (tensors(&a), tensors(&b));
    assert!(a.len() > 30);
    for ((name, a), (_, b)) in a.iter().zip(&b).filter(|((name, _), _)| name != "history.held_out") {
        assert!(a == b, "{name} differs after the break");
    }

    place.refuses(&format!("{resume} --seed 9"), &["--seed is 9", "trained with 1"]);
    place.refuses(&format!("{resume} --steps 10"), &["--steps is 10", "trained with 9"]);
    place.refuses(&format!("{resume} --stop-at 2"), &["--stop-at is 2", "step 4"]);
    std::fs::write(place.path("other.txt"), "another text. ".repeat(1000)).expect("a text");
    refused(&place.run(&format!("{resume} --text other.txt")), &["--text is other.txt", "another text"]);
    std::fs::write(place.path("broken.safetensors"), b"not one").expect("a file");
    place.refuses("--resume broken.safetensors", &["--resume broken.safetensors", "not a safetensors file"]);
    place.refuses("--resume missing.safetensors", &["--resume missing.safetensors", "No such file"]);
}

#[test]
fn it_learns_and_writes_what_it_says() {
    let place = Place::new();
    let metrics = place.metrics("--steps 60 --learning-rate 0.01 --checkpoint-every 20", "out");
    let all: Vec<f64> =
        metrics["losses"].as_array().expect("losses").iter().map(|l| l.as_f64().expect("a loss")).collect();
    let bits = |model: &str| metrics["bits_per_byte"][model].as_f64().expect("bits");
    println!(
        "loss {:.3} to {:.3}; model {:.3}, bigram {:.3}, trigram {:.3} bits per byte",
        all[0],
        all[59],
        bits("model"),
        bits("bigram"),
        bits("trigram")
    );
    assert!(all[59] < 0.6 * all[0]);
    assert!(bits("trigram") < bits("bigram") && bits("bigram") < 8.0);
    let routes: Vec<u64> = metrics["expert_load"]
        .as_array()
        .expect("layers")
        .iter()
        .map(|layer| layer.as_array().expect("experts").iter().map(|n| n.as_u64().expect("a count")).sum())
        .collect();
    assert!(routes.len() == 2 && routes[0] == routes[1] && routes[0] > 0);
    let svg = std::fs::read_to_string(place.path("out/loss.svg")).expect("a curve");
    assert!(svg.starts_with("<svg") && svg.contains("bits per byte") && svg.contains("step"));
    let mut files: Vec<_> = std::fs::read_dir(place.path("out"))
        .expect("a folder")
        .map(|f| f.expect("a file").file_name())
        .collect();
    files.sort();
    assert_eq!(files, ["checkpoint.safetensors", "loss.svg", "metrics.json"]);
}

#[test]
fn bad_input_names_the_option_the_value_and_what_is_allowed() {
    let place = Place::new();
    std::fs::write(place.path("short.txt"), "too short").expect("a text");
    std::fs::write(place.path("empty.txt"), "").expect("a text");
    for (options, words) in [
        ("--text nowhere.txt", &["--text nowhere.txt", "No such file"][..]),
        ("--text short.txt", &["--text short.txt has 9 bytes", "at least 340"]),
        ("--text empty.txt", &["0 bytes"]),
        ("--ranks 3", &["--ranks is 3", "--experts (4)"]),
        ("--ranks 0", &["--ranks is 0", "1 to 4"]),
        ("--steps 0", &["--steps is 0", "1 to"]),
        ("--batch 0", &["--batch is 0"]),
        ("--context 1", &["--context is 1", "2 to 4096"]),
        ("--heads 3", &["--heads is 3", "--hidden (16)"]),
        ("--heads 0", &["--heads is 0"]),
        ("--hidden 20", &["hidden is 20", "multiple of 8"]),
        ("--intermediate 0", &["intermediate is 0"]),
        ("--experts 0", &["--experts is 0", "1 to 4096"]),
        ("--top-k 5", &["--top-k is 5", "1 to 4"]),
        ("--learning-rate nan", &["--learning-rate is NaN"]),
        ("--stop-at 800", &["--stop-at is 800", "1 to --steps (650)"]),
        ("--checkpoint-every 0", &["--checkpoint-every is 0"]),
        ("--minibatch-rows 100", &["minibatch_rows is 100", "128"]),
        ("--out text.txt", &["--out text.txt", "folder"]),
        ("--precision f16", &["f16", "bf16"]),
    ] {
        // An option may be given once: the tiny model's own gives way.
        let name = options.split(' ').next().expect("an option");
        let tiny: Vec<&str> = TINY.split(" --").collect();
        let kept = tiny.iter().map(|o| format!("--{}", o.trim_start_matches("--")));
        let kept: Vec<String> = kept.filter(|o| o.split(' ').next() != Some(name)).collect();
        let text = if name == "--text" { "" } else { "--text text.txt" };
        refused(&place.run(&format!("{} {text} {options}", kept.join(" "))), words);
    }
}

#[test]
fn help_says_what_is_trained_and_written() {
    let help = String::from_utf8(Place::new().run("--help").stdout).expect("text");
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for word in [
        "bits per byte",
        "loss.svg",
        "metrics.json",
        "checkpoint.safetensors",
        "Examples:",
        "--resume",
        "--ranks",
    ] {
        assert!(help.contains(word), "{word}");
    }
}
