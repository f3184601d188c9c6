//! Inputs that must be refused, with the argument and its value named, before anything is computed; and the one
//! choice among equals that the router makes.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use kodkod::{Error, ExpertGroup, Knobs, MoeLayer, Result, Shape, SharedWeights, Weights};
use kodkod_candle::{Router, RouterConfig, Scoring};

use super::cases::{self, Random};
use super::{Job, Row};
use crate::step::{Step, filled};

/// What is called, and what the error must say.
type Refused = (&'static str, fn() -> Result<()>, &'static [&'static str]);

pub(super) fn jobs() -> Vec<Job> {
    vec![
        Job::new("case-08 expert ids that do not exist", None, |row| all(row, &IDS)),
        Job::new("case-10 sizes that are no multiple", None, |row| all(row, &SIZES)),
        Job::new("case-15 tied router scores", None, ties),
        Job::new("case-17 arguments that do not fit", None, |row| all(row, &ARGUMENTS)),
    ]
}

fn all(mut row: Row, calls: &[Refused]) -> Row {
    for (what, call, words) in calls {
        row.runs += 1;
        match call() {
            Ok(()) => row.miss(format!("{what}: not refused")),
            Err(error) => {
                let text = error.to_string();
                if let Some(word) = words.iter().find(|word| !text.contains(**word)) {
                    row.miss(format!("{what}: {text:?} does not say {word:?}"));
                }
            }
        }
    }
    row
}

fn small() -> Step<f32> {
    cases::step(Shape::new(32, 24, 4, 2), vec![0, 1, 2, 3, 3, 0], &mut Random::new(80))
}

fn with_id(place: usize, id: i64) -> Result<()> {
    let mut step = small();
    step.ids[place] = id;
    step.routing(&[3]).map(drop)
}

const IDS: [Refused; 4] = [
    ("the number of experts", || with_id(3, 4), &["topk_ids[1, 1] is 4", "0 to 3"]),
    ("below -1", || with_id(4, -2), &["topk_ids[2, 0] is -2", "-1"]),
    ("beyond 32 bits", || with_id(0, 1 << 32), &["topk_ids[0, 0] is 4294967296"]),
    ("the least of 64 bits", || with_id(5, i64::MIN), &["topk_ids[2, 1] is -9223372036854775808"]),
];

fn layer(shape: Shape) -> Result<()> {
    let knobs = Knobs::for_shape(&shape);
    MoeLayer::<f32>::new(&ExpertGroup::cpu(1)?, shape, knobs).map(drop)
}

const SIZES: [Refused; 6] = [
    ("hidden 2884", || layer(Shape::new(2884, 64, 4, 2)), &["hidden is 2884", "multiple of 8"]),
    ("hidden 0", || layer(Shape::new(0, 64, 4, 2)), &["hidden is 0", "multiple of 8"]),
    ("intermediate 1409", || layer(Shape::new(64, 1409, 4, 2)), &["intermediate is 1409", "multiple of 8"]),
    (
        "shared 12",
        || {
            let shared = Some(kodkod::Shared { intermediate: 12, output_gate: false });
            layer(Shape { shared, ..Shape::new(64, 64, 4, 2) })
        },
        &["shared intermediate is 12", "multiple of 8"],
    ),
    ("top-0", || layer(Shape::new(64, 64, 4, 0)), &["top_k is 0", "1 to 32"]),
    ("no experts", || layer(Shape::new(64, 64, 0, 1)), &["experts is 0"]),
];

/// A forward and a backward of the small step, with one argument changed.
fn call(change: fn(&mut Step<f32>)) -> Result<()> {
    let (right, mut step) = (small(), small());
    change(&mut step);
    let group = ExpertGroup::cpu(2)?;
    let layer = MoeLayer::<f32>::new(&group, right.shape.clone(), Knobs::for_shape(&right.shape))?;
    let routing = right.routing(&[2, 1])?;
    let (_, context) = layer.forward(&step.x, &routing, &step.weights.as_ref())?;
    let dy = step.dy.as_deref().unwrap_or_default();
    let mut gradients = filled(&step.shape, 0.0);
    let gradients = gradients.as_mut();
    layer.backward(&context, dy, &step.x, &routing, &step.weights.as_ref(), gradients, false).map(drop)
}

fn group_and_knobs(ranks: usize, change: fn(&mut Knobs)) -> Result<()> {
    let step = small();
    let mut knobs = Knobs::for_shape(&step.shape);
    change(&mut knobs);
    let mut split = vec![0; ranks];
    split[0] = 3;
    step.run(&ExpertGroup::cpu(ranks)?, knobs, &split).map(drop)
}

const ARGUMENTS: [Refused; 15] = [
    ("x too short", || call(|s| s.x.truncate(95)), &["x has 95", "expected 96"]),
    ("x of a token too many", || call(|s| s.x.extend([0.0; 32])), &["x has 128", "expected 96"]),
    ("dy too short", || call(|s| s.dy = Some(vec![0.0; 64])), &["dy has 64", "expected 96"]),
    ("w_gate of an expert less", || call(|s| s.weights.gate.truncate(3 * 768)), &["w_gate has 2304"]),
    ("w_up empty", || call(|s| s.weights.up.clear()), &["w_up has 0"]),
    ("w_down too long", || call(|s| s.weights.down.push(0.0)), &["w_down has 3073"]),
    (
        "biases that the shape has not",
        || {
            call(|s| {
                let b = || vec![0.0; 96];
                s.weights.biases = Some(kodkod::Biases { gate: b(), up: b(), down: vec![0.0; 128] });
            })
        },
        &["biases"],
    ),
    (
        "shared experts that the shape has not",
        || {
            call(|s| {
                let w = || vec![0.0; 8 * 32];
                s.weights.shared = Some(SharedWeights { gate: w(), up: w(), down: w(), output_gate: None });
            })
        },
        &["shared weights"],
    ),
    (
        "gradients of another shape",
        || call(|s| s.shape.intermediate = 32),
        &["dw_gate has 4096", "expected 3072"],
    ),
    (
        "router weights too short",
        || {
            let mut step = small();
            step.topk_weights.pop();
            step.routing(&[3]).map(drop)
        },
        &["topk_weights has 5", "expected 6"],
    ),
    ("a split of other tokens", || small().routing(&[1, 1]).map(drop), &["topk_ids has 6", "expected 4"]),
    ("no ranks in the split", || small().routing(&[]).map(drop), &["tokens_per_rank"]),
    ("ranks that do not divide the experts", || group_and_knobs(3, |_| ()), &["ranks is 3", "divide"]),
    (
        "a minibatch of 100 rows",
        || group_and_knobs(2, |k| k.minibatch_rows = 100),
        &["minibatch_rows is 100", "128"],
    ),
    (
        "weights for another layer",
        || {
            let step = small();
            let group = ExpertGroup::cpu(1)?;
            let layer = MoeLayer::<f32>::new(&group, step.shape.clone(), Knobs::for_shape(&step.shape))?;
            let w = &step.weights;
            let weights =
                Weights { gate: &w.gate, up: &w.up, down: &w.down[1..], biases: None, shared: None };
            match layer.forward(&step.x, &step.routing(&[3])?, &weights) {
                Ok(_) => Ok(()),
                Err(error @ Error::Length { .. }) => Err(error),
                Err(other) => Err(Error::invalid("error", other, "a length is what is wrong")),
            }
        },
        &["w_down has 3071"],
    ),
];

/// With all scores equal, the lowest ids are chosen, in order.
fn ties(mut row: Row) -> Row {
    for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
        row.runs += 1;
        let chosen = || -> candle_core::Result<Vec<i32>> {
            let zeros = VarBuilder::zeros(DType::F32, &Device::Cpu);
            let router = Router::new(16, RouterConfig { scoring, ..RouterConfig::new(8, 3) }, zeros)?;
            Ok(router.forward(&Tensor::ones((2, 16), DType::F32, &Device::Cpu)?)?.ids)
        };
        match chosen() {
            Ok(ids) if ids == [0, 1, 2, 0, 1, 2] => {}
            Ok(ids) => row.miss(format!("{scoring:?} chose {ids:?}")),
            Err(error) => row.miss(format!("{scoring:?}: {error}")),
        }
    }
    row
}
