//! An output that cannot be written, as on a full disk, is an error with exit status 2, whatever the command.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::process::{Command, Stdio};

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("Linux has it").into()
}

#[test]
fn a_full_disk_is_an_error_and_no_panic() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("train");
    let out = out.to_str().expect("UTF-8");
    let tiny = ["bench", "--shape", "64x32x4x2", "--dense-size", "64", "--repeat", "1", "--tokens", "16"];
    for args in [
        &[&tiny[..], &["--ranks", "1"]].concat()[..],
        &[&tiny[..], &["--ranks", "1", "--json"]].concat(),
        &[&tiny[..], &["--ranks", "1", "--memory"]].concat(),
        &["check", "--filter", "case-06"],
        &["check", "--filter", "case-06", "--json"],
        &["doctor"],
        &["doctor", "--json"],
        &["train", "--steps", "1", "--out", out],
        &["trace", "--help"],
        &["--version"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kodkod"));
        let output = command.args(args).stdout(full()).output().expect("kodkod runs");
        let err = String::from_utf8_lossy(&output.stderr);
        println!("{args:?}: {err}");
        assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains("error: standard output: No space left"), "{args:?}: {err}");
        // The same where the error cannot be written either.
        let status = command.stderr(full()).status().expect("kodkod runs");
        assert_eq!(status.code(), Some(2), "{args:?}, with standard error on a full disk");
    }
}
