//! `kodkod replay` end to end: files in, files out, the exit status and what is said.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kodkod::{Activation, Biases, Routing, Shape, Shared, SharedWeights, Weights, bf16, reference};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

/// Numbers in -1..1 from a 64-bit linear congruence.
struct Random(u64);

impl Random {
    fn list(&mut self, n: usize, scale: f32) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| scale * next()).collect()
    }
}

/// A tensor of a file.
#[derive(Clone)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Entry {
    fn float(dtype: Dtype, shape: &[usize], values: &[f32]) -> Self {
        let bytes = match dtype {
            Dtype::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        Entry { dtype, shape: shape.to_vec(), bytes }
    }

    fn ids(shape: &[usize], values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Entry { dtype: Dtype::I64, shape: shape.to_vec(), bytes }
    }

    fn floats(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::BF16 => {
                self.bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
            }
            _ => self.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        }
    }
}

#[derive(Clone)]
struct Step {
    shape: Shape,
    ids: Vec<i64>,
    tensors: HashMap<&'static str, Entry>,
    metadata: HashMap<String, String>,
}

impl Step {
    /// A step of `shape` with 80 tokens, all of its tensors in `dtype` where they may be.
    fn new(shape: Shape, dtype: Dtype) -> Self {
        Self::with_tokens(shape, dtype, 80)
    }

    fn with_tokens(shape: Shape, dtype: Dtype, n: usize) -> Self {
        let mut random = Random(7);
        let (h, i, e, k) = (shape.hidden, shape.intermediate, shape.experts, shape.top_k);
        let ids: Vec<i64> = (0..n * k).map(|r| ((r * 7 + r / 5) % (e + 1)) as i64 - 1).collect();
        let mut tensors = HashMap::new();
        let mut float = |name, dtype, dims: &[usize], scale| {
            let values = random.list(dims.iter().product(), scale);
            tensors.insert(name, Entry::float(dtype, dims, &values));
        };
        float("x", dtype, &[n, h], 1.0);
        float("dy", dtype, &[n, h], 1.0);
        float("topk_weights", Dtype::F32, &[n, k], 1.0);
        float("w_gate", dtype, &[e, i, h], 0.3);
        float("w_up", dtype, &[e, i, h], 0.3);
        float("w_down", dtype, &[e, h, i], 0.3);
        if shape.biases {
            float("b_gate", dtype, &[e, i], 0.5);
            float("b_up", dtype, &[e, i], 0.5);
            float("b_down", dtype, &[e, h], 0.5);
        }
        if let Some(s) = shape.shared {
            float("shared_gate", dtype, &[s.intermediate, h], 0.3);
            float("shared_up", dtype, &[s.intermediate, h], 0.3);
            float("shared_down", dtype, &[h, s.intermediate], 0.3);
            if s.output_gate {
                float("shared_output_gate", dtype, &[1, h], 0.3);
            }
        }
        tensors.insert("topk_ids", Entry::ids(&[n, k], &ids));
        let mut metadata = HashMap::new();
        if let Activation::SwiGluOai { .. } = shape.activation {
            metadata.insert("activation".into(), "swiglu_oai".into());
        }
        if let Some(limit) = shape.activation.limit() {
            metadata.insert("limit".into(), limit.to_string());
        }
        Step { shape, ids, tensors, metadata }
    }

    fn write(&self, path: &Path) {
        let views = self.tensors.iter().map(|(name, t)| {
            (*name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("a right entry"))
        });
        safetensors::serialize_to_file(views, Some(self.metadata.clone()), path).expect("written");
    }

    fn reference(&self) -> reference::Outputs {
        let all: HashMap<_, _> = self.tensors.iter().map(|(name, t)| (*name, t.floats())).collect();
        let get = |name: &str| all.get(name).map(|v| &v[..]);
        let must = |name: &str| get(name).expect("given");
        let tokens = self.tensors["x"].shape[0];
        let routing =
            Routing::new(&self.shape, &self.ids, must("topk_weights"), &[tokens]).expect("right ids");
        let weights = Weights {
            gate: must("w_gate"),
            up: must("w_up"),
            down: must("w_down"),
            biases: get("b_gate").map(|gate| Biases { gate, up: must("b_up"), down: must("b_down") }),
            shared: get("shared_gate").map(|gate| SharedWeights {
                gate,
                up: must("shared_up"),
                down: must("shared_down"),
                output_gate: get("shared_output_gate"),
            }),
        };
        reference::layer(&self.shape, must("x"), get("dy"), &routing, &weights).expect("right inputs")
    }
}

fn everything() -> Shape {
    Shape {
        shared: Some(Shared { intermediate: 40, output_gate: true }),
        activation: Activation::SwiGluOai { alpha: 1.702, limit: Some(1.5) },
        biases: true,
        ..Shape::new(64, 48, 4, 3)
    }
}

fn replay(file: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kodkod")).arg("replay").arg(file).args(args).output().expect("it runs")
}

/// The folder (kept alive by the first), the step's file and the output's.
fn folder(step: &Step) -> (TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, out) = (folder.path().join("step.safetensors"), folder.path().join("out.safetensors"));
    step.write(&input);
    (folder, input, out)
}

fn read(path: &Path) -> HashMap<String, Entry> {
    let bytes = std::fs::read(path).expect("an output file");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let entry = |view: TensorView| Entry {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: view.data().to_vec(),
    };
    tensors.iter().map(|(name, view)| (name.to_owned(), entry(view))).collect()
}

#[track_caller]
fn succeed(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out.into_owned()
}

#[test]
fn outputs_agree_with_the_reference_in_names_types_shapes_and_values() {
    for (dtype, shape, tolerance) in [
        (Dtype::F32, everything(), 1e-5),
        (Dtype::F32, Shape::new(64, 48, 4, 2), 1e-5),
        (Dtype::BF16, everything(), 0.01),
        (Dtype::BF16, Shape::new(64, 48, 4, 2), 0.01),
    ] {
        let step = Step::new(shape, dtype);
        let (_folder, input, out) = folder(&step);
        let args = ["--ranks", "2", "--check", "--out", out.to_str().expect("UTF-8")];
        println!("{}", succeed(&replay(&input, &args)));
        let written = read(&out);
        let reference = step.reference();
        assert_eq!(written.len(), reference.named().len());
        for (name, expected) in reference.named() {
            let entry = &written[name];
            let like = match name {
                "y" | "dx" => "x",
                "d_topk_weights" => "topk_weights",
                _ => {
                    &name.replacen("dw_", "w_", 1).replacen("db_", "b_", 1).replacen("d_shared", "shared", 1)
                }
            };
            assert_eq!(entry.shape, step.tensors[like].shape, "{name}");
            assert_eq!(entry.dtype, if like == "x" { dtype } else { Dtype::F32 }, "{name}");
            let error: f64 =
                entry.floats().iter().zip(expected).map(|(v, r)| (f64::from(*v) - r).abs()).sum();
            let error = error / expected.iter().map(|r| r.abs()).sum::<f64>();
            println!("{dtype:?} {name}: {error:.2e} (allowed {tolerance:e})");
            assert!(error <= tolerance, "{name}: {error:e}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_ranks_splits_knobs_or_threads() {
    let step = Step::new(everything(), Dtype::BF16);
    let (folder, input, out) = folder(&step);
    succeed(&replay(&input, &["--out", out.to_str().expect("UTF-8")]));
    let first = std::fs::read(&out).expect("an output file");
    for (at, args) in [
        &["--ranks", "4", "--threads", "3"][..],
        &["--tokens-per-rank", "0,17,63,0", "--saved-rows", "0"],
        &["--tokens-per-rank", "79,1", "--minibatch-rows", "128", "--ring-rows", "128", "--isa", "scalar"],
        &["--fwd-comm-sms", "2", "--bwd-comm-sms", "3", "--threads", "1"],
    ]
    .into_iter()
    .enumerate()
    {
        let other = folder.path().join(format!("{at}.safetensors"));
        succeed(&replay(&input, &[args, &["--out", other.to_str().expect("UTF-8")]].concat()));
        assert!(std::fs::read(&other).expect("an output file") == first, "{args:?} gives other bits");
    }
}

#[test]
fn precision_changes_the_arithmetic_and_not_the_types() {
    for (dtype, precision) in [(Dtype::BF16, "f32"), (Dtype::F32, "bf16")] {
        let step = Step::new(everything(), dtype);
        let (_folder, input, out) = folder(&step);
        let args = ["--precision", precision, "--check", "--json", "--out", out.to_str().expect("UTF-8")];
        let report: serde_json::Value = serde_json::from_str(&succeed(&replay(&input, &args))).expect("JSON");
        assert_eq!(report["precision"], precision);
        assert_eq!(report["passed"], true);
        let written = read(&out);
        assert_eq!((written["y"].dtype, written["dw_gate"].dtype), (dtype, Dtype::F32));
    }
}

#[test]
fn without_dy_there_is_a_forward_only() {
    let mut step = Step::new(everything(), Dtype::BF16);
    step.tensors.remove("dy");
    let (_folder, input, out) = folder(&step);
    let text = succeed(&replay(&input, &["--check", "--json", "--out", out.to_str().expect("UTF-8")]));
    let report: serde_json::Value = serde_json::from_str(&text).expect("one JSON object");
    assert!(report["backward_ms"].is_null() && report["forward_ms"].is_f64(), "{text}");
    assert_eq!(read(&out).into_keys().collect::<Vec<_>>(), ["y"]);
}

#[test]
fn no_tokens_give_empty_rows_and_zero_gradients() {
    let step = Step::with_tokens(everything(), Dtype::BF16, 0);
    let (_folder, input, out) = folder(&step);
    succeed(&replay(&input, &["--ranks", "2", "--check", "--out", out.to_str().expect("UTF-8")]));
    let written = read(&out);
    assert_eq!(written["y"].shape, [0, 64]);
    assert_eq!(written["d_topk_weights"].shape, [0, 3]);
    for (name, entry) in &written {
        assert!(entry.floats().iter().all(|v| *v == 0.0), "{name} is not 0");
    }
}

#[test]
fn ids_of_32_bits_and_numbers_that_are_not_finite_are_taken() {
    let mut step = Step::new(Shape::new(64, 48, 4, 2), Dtype::BF16);
    let bytes = step.ids.iter().flat_map(|id| (*id as i32).to_le_bytes()).collect();
    step.tensors.insert("topk_ids", Entry { dtype: Dtype::I32, shape: vec![80, 2], bytes });
    let mut x = step.tensors["x"].floats();
    (x[5 * 64], x[9 * 64 + 1]) = (f32::NAN, f32::INFINITY);
    step.tensors.insert("x", Entry::float(Dtype::BF16, &[80, 64], &x));
    let (_folder, input, out) = folder(&step);
    succeed(&replay(&input, &["--check", "--out", out.to_str().expect("UTF-8")]));
    for (i, v) in read(&out)["y"].floats().iter().enumerate() {
        assert_eq!(v.is_finite(), ![5, 9].contains(&(i / 64)), "y of token {} is {v}", i / 64);
    }
}

/// Changes one thing of a right step.
type Change = fn(&mut Step);

#[test]
fn bad_input_is_refused_with_its_name_and_value() {
    let cases: &[(&str, Change, &[&str], &[&str])] = &[
        ("no x", |s| drop(s.tensors.remove("x")), &[], &["tensor x is missing", "topk_ids"]),
        ("no w_up", |s| drop(s.tensors.remove("w_up")), &[], &["tensor w_up is missing"]),
        (
            "a misspelt dy",
            |s| {
                let dy = s.tensors.remove("dy").expect("given");
                s.tensors.insert("d_y", dy);
            },
            &[],
            &["unknown tensor \"d_y\"", "dy"],
        ),
        ("half of the biases", |s| drop(s.tensors.remove("b_up")), &[], &["b_up is missing", "b_gate"]),
        (
            "half of the shared experts",
            |s| drop(s.tensors.remove("shared_down")),
            &[],
            &["shared_down is missing", "shared_gate"],
        ),
        (
            "an output gate alone",
            |s| ["shared_gate", "shared_up", "shared_down"].iter().for_each(|n| drop(s.tensors.remove(n))),
            &[],
            &["shared_gate is missing", "shared_output_gate"],
        ),
        (
            "x of integers",
            |s| s.tensors.get_mut("x").expect("given").dtype = Dtype::U16,
            &[],
            &["x is U16", "BF16 or F32"],
        ),
        (
            "ids of floats",
            |s| s.tensors.get_mut("topk_ids").expect("given").dtype = Dtype::F64,
            &[],
            &["topk_ids is F64", "I32 or I64"],
        ),
        (
            "router weights in bf16",
            |s| {
                let values = s.tensors["topk_weights"].floats();
                s.tensors.insert("topk_weights", Entry::float(Dtype::BF16, &[80, 3], &values));
            },
            &[],
            &["topk_weights is BF16", "F32"],
        ),
        (
            "x of three dimensions",
            |s| s.tensors.get_mut("x").expect("given").shape = vec![2, 40, 64],
            &[],
            &["x has shape [2, 40, 64]", "[N, H]"],
        ),
        (
            "dy of fewer tokens",
            |s| drop(s.tensors.insert("dy", Entry::float(Dtype::BF16, &[79, 64], &[0.0; 79 * 64]))),
            &[],
            &["dy has shape [79, 64]", "[N, H] = [80, 64]"],
        ),
        (
            "w_down transposed",
            |s| s.tensors.get_mut("w_down").expect("given").shape = vec![4, 48, 64],
            &[],
            &["w_down has shape [4, 48, 64]", "[E, H, I] = [4, 64, 48]"],
        ),
        (
            "biases of another width",
            |s| drop(s.tensors.insert("b_down", Entry::float(Dtype::F32, &[4, 48], &[0.0; 192]))),
            &[],
            &["b_down has shape [4, 48]", "[E, H] = [4, 64]"],
        ),
        (
            "an output gate of the wrong shape",
            |s| s.tensors.get_mut("shared_output_gate").expect("given").shape = vec![64],
            &[],
            &["shared_output_gate has shape [64]", "[1, 64]"],
        ),
        (
            "ids for fewer tokens",
            |s| drop(s.tensors.insert("topk_ids", Entry::ids(&[79, 3], &[0; 237]))),
            &[],
            &["topk_ids has shape [79, 3]", "[80, 3]"],
        ),
        (
            "an id that is no expert",
            |s| {
                s.ids[31] = 4;
                drop(s.tensors.insert("topk_ids", Entry::ids(&[80, 3], &s.ids)))
            },
            &[],
            &["topk_ids[10, 1] is 4", "0 to 3"],
        ),
        (
            "an id below -1",
            |s| {
                s.ids[239] = -2;
                drop(s.tensors.insert("topk_ids", Entry::ids(&[80, 3], &s.ids)))
            },
            &[],
            &["topk_ids[79, 2] is -2", "-1"],
        ),
        (
            "an id that 32 bits would cut to 0",
            |s| {
                s.ids[0] = 1 << 32;
                drop(s.tensors.insert("topk_ids", Entry::ids(&[80, 3], &s.ids)))
            },
            &[],
            &["topk_ids[0, 0] is 4294967296"],
        ),
        (
            "top-0",
            |s| {
                s.tensors.insert("topk_ids", Entry::ids(&[80, 0], &[]));
                s.tensors.insert("topk_weights", Entry::float(Dtype::F32, &[80, 0], &[]));
            },
            &[],
            &["topk_ids", "top_k is 0", "1 to 32"],
        ),
        (
            "top-33",
            |s| {
                s.tensors.insert("topk_ids", Entry::ids(&[80, 33], &[0; 80 * 33]));
                s.tensors.insert("topk_weights", Entry::float(Dtype::F32, &[80, 33], &[0.0; 80 * 33]));
            },
            &[],
            &["topk_ids", "top_k is 33", "1 to 32"],
        ),
        (
            "a hidden size that is no multiple",
            |s| *s = Step::new(Shape::new(60, 48, 4, 2), Dtype::BF16),
            &[],
            &["x", "hidden is 60", "multiple of 8"],
        ),
        (
            "an intermediate size that is no multiple",
            |s| *s = Step::new(Shape::new(64, 44, 4, 2), Dtype::BF16),
            &[],
            &["w_gate", "intermediate is 44", "multiple of 8"],
        ),
        (
            "an unknown activation",
            |s| drop(s.metadata.insert("activation".into(), "gelu".into())),
            &[],
            &["activation is \"gelu\"", "swiglu_oai"],
        ),
        (
            "a limit that is no number",
            |s| drop(s.metadata.insert("limit".into(), "seven".into())),
            &[],
            &["limit is \"seven\"", "number"],
        ),
        (
            "a negative limit",
            |s| drop(s.metadata.insert("limit".into(), "-7".into())),
            &[],
            &["limit is -7", "positive"],
        ),
        (
            "an alpha that is no number",
            |s| drop(s.metadata.insert("alpha".into(), "".into())),
            &[],
            &["alpha is \"\"", "number"],
        ),
        (
            "an infinite alpha",
            |s| drop(s.metadata.insert("alpha".into(), "inf".into())),
            &[],
            &["alpha is inf", "finite"],
        ),
        (
            "an alpha without its activation",
            |s| {
                s.metadata = HashMap::from([("alpha".into(), "1.702".into())]);
            },
            &[],
            &["alpha is 1.702", "swiglu_oai"],
        ),
        ("ranks that do not divide", |_| (), &["--ranks", "3"], &["--ranks", "3", "divide", "4"]),
        ("no ranks", |_| (), &["--ranks", "0"], &["--ranks", "0", "at least 1"]),
        ("as many ranks as can be", |_| (), &["--ranks", "18446744073709551615"], &["--ranks", "divide"]),
        ("a wrong sum", |_| (), &["--tokens-per-rank", "40,39"], &["--tokens-per-rank", "79", "80"]),
        (
            "a sum beyond 64 bits",
            |_| (),
            &["--tokens-per-rank", "18446744073709551615,81"],
            &["--tokens-per-rank", "80 tokens"],
        ),
        ("three counts", |_| (), &["--tokens-per-rank", "40,39,1"], &["--tokens-per-rank", "3", "divide"]),
        ("a count that is no number", |_| (), &["--tokens-per-rank", "40,x"], &["--tokens-per-rank", "x"]),
        (
            "both splits",
            |_| (),
            &["--tokens-per-rank", "40,40", "--ranks", "2"],
            &["--ranks", "--tokens-per-rank", "cannot"],
        ),
        ("another precision", |_| (), &["--precision", "f16"], &["--precision", "f16", "bf16"]),
        ("a minibatch of 100", |_| (), &["--minibatch-rows", "100"], &["minibatch_rows is 100", "128"]),
        ("no minibatch", |_| (), &["--minibatch-rows", "0"], &["minibatch_rows is 0", "128"]),
        (
            "a ring of one and a half minibatches",
            |_| (),
            &["--minibatch-rows", "256", "--ring-rows", "384"],
            &["ring_rows is 384", "256"],
        ),
        ("a ring of 0", |_| (), &["--ring-rows", "0"], &["ring_rows is 0"]),
        ("no SMs", |_| (), &["--fwd-comm-sms", "0"], &["fwd_comm_sms is 0", "1 to"]),
        ("too many SMs", |_| (), &["--bwd-comm-sms", "99999"], &["bwd_comm_sms is 99999"]),
        ("an unknown instruction set", |_| (), &["--isa", "sse2"], &["--isa", "sse2", "scalar"]),
        ("an option that does not exist", |_| (), &["--rank", "2"], &["--rank"]),
        (
            "an output in no folder",
            |_| (),
            &["--out", "/no/such/folder/out"],
            &["--out", "/no/such/folder/out"],
        ),
        // Refused although the step is wrong too: it is found before the step is read.
        (
            "an output in a folder that nobody can write to",
            |s| drop(s.tensors.remove("x")),
            &["--out", "/proc/out"],
            &["--out", "/proc/out", "can be written to"],
        ),
    ];
    let mut failed = Vec::new();
    for (name, change, args, words) in cases {
        let mut step = Step::new(everything(), Dtype::BF16);
        change(&mut step);
        let (_folder, input, _) = folder(&step);
        let output = replay(&input, args);
        let said = String::from_utf8_lossy(&output.stderr);
        println!("{name}: {}", said.trim());
        if output.status.code() != Some(2)
            || !words.iter().all(|w| said.contains(w))
            || said.contains("panicked")
        {
            failed.push(format!("{name}: {}, expected 2 and {words:?}\n{said}", output.status));
        }
    }
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), cases.len(), failed.join("\n"));
}

#[test]
fn files_that_are_no_steps_are_refused() {
    let step = Step::new(everything(), Dtype::BF16);
    let (folder, input, _) = folder(&step);
    let whole = std::fs::read(&input).expect("the step");
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    for (name, bytes) in [
        ("empty", &b""[..]),
        ("text", b"this is no safetensors file, but some text"),
        ("cut in the header", &whole[..100]),
        ("cut in the data", &whole[..whole.len() - 1]),
        ("too long", &[&whole[..], &[0]].concat()),
        ("header of 2^64 bytes", &huge),
    ] {
        let path = folder.path().join("bad.safetensors");
        std::fs::write(&path, bytes).expect("written");
        let output = replay(&path, &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        println!("{name}: {}", said.trim());
        assert_eq!(output.status.code(), Some(2), "{name}: {said}");
        assert!(
            said.contains("bad.safetensors") && said.contains("not a whole safetensors file"),
            "{name}: {said}"
        );
    }
    for path in [folder.path().join("absent"), folder.path().to_owned()] {
        let output = replay(&path, &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(path.to_str().expect("UTF-8")), "{said}");
    }
}

#[test]
fn an_output_is_never_the_input_and_a_refused_step_leaves_no_file() {
    let mut step = Step::new(everything(), Dtype::BF16);
    let (folder, input, out) = folder(&step);
    let output = replay(&input, &["--out", input.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--out"));
    step.tensors.remove("w_up");
    step.write(&input);
    assert_eq!(replay(&input, &["--out", out.to_str().expect("UTF-8")]).status.code(), Some(2));
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder").count(), 1, "only the input is there");
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_an_error_and_no_panic() {
    let (_folder, input, _) = folder(&Step::new(everything(), Dtype::BF16));
    for extra in [&[][..], &["--json"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("Linux has it");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kodkod"));
        let output = command.arg("replay").arg(&input).args(extra).stdout(full).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        println!("{said}");
        assert!(output.status.code() == Some(2) && said.contains("error: standard output"), "{said}");
    }
}
