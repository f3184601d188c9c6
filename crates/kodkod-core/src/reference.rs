//! The layer in plain `f64`, forward and backward: what every machine is held against. It shares no arithmetic with
//! any of them.
//!
//! For a row `x` of expert `e`, with router weight `w` and output gradient `dy`:
//!
//! ```text
//! g = x W_gate^T + b_gate             u = x W_up^T + b_up
//! g' = min(g, L)                      u' = min(max(u, -L), L)
//! h = (u' + o) g' s,  s = sigmoid(a g')
//! y_k = h W_down^T + b_down           y = sum over k of w_k y_k
//!
//! dh' = dy W_down                     dw = dh' . h + dy . b_down
//! dg = w dh' (u' + o) s (1 + a g' (1 - s))   where g <= L, else 0
//! du = w dh' g' s                            where |u| <= L, else 0
//! dx_k = dg W_gate + du W_up
//! dW_gate = dg^T x                    dW_up = du^T x              dW_down = (w dy)^T h
//! db_gate = sum dg                    db_up = sum du              db_down = sum w dy
//! ```
//!
//! The shared experts are one more expert that every token is routed to, without biases, with weight 1 or
//! `sigmoid(x . w_output_gate)`.

use crate::error::{Error, Result};
use crate::numerics::Element;
use crate::routing::Routing;
use crate::shape::{Activation, Shape};
use crate::tensors::{Biases, SharedWeights, WeightGradients, Weights};

/// What one step of the layer gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Outputs {
    /// `[tokens, hidden]`
    pub y: Vec<f64>,
    /// Given where `dy` was.
    pub gradients: Option<Gradients>,
    /// How near any `g` or `|u|` is to the clamp, as a part of the limit; infinite where there is none. The derivative
    /// jumps there: where this is no more than the rounding errors of `g`, either side is right.
    pub clamp_margin: f64,
}

/// What the backward gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// `[tokens, hidden]`
    pub dx: Vec<f64>,
    /// `[tokens, top_k]`; 0 where there is no route.
    pub d_topk_weights: Vec<f64>,
    /// Gradients of all weights.
    pub weights: WeightGradients<Vec<f64>>,
}

impl Outputs {
    /// Every output with its name, in a fixed order.
    pub fn named(&self) -> Vec<(&'static str, &[f64])> {
        let mut all = vec![("y", &self.y[..])];
        let Some(gradients) = &self.gradients else {
            return all;
        };
        all.extend([("dx", &gradients.dx[..]), ("d_topk_weights", &gradients.d_topk_weights)]);
        let w = &gradients.weights;
        all.extend([("dw_gate", &w.gate[..]), ("dw_up", &w.up), ("dw_down", &w.down)]);
        if let Some(b) = &w.biases {
            all.extend([("db_gate", &b.gate[..]), ("db_up", &b.up), ("db_down", &b.down)]);
        }
        if let Some(s) = &w.shared {
            all.extend([("d_shared_gate", &s.gate[..]), ("d_shared_up", &s.up), ("d_shared_down", &s.down)]);
            all.extend(s.output_gate.as_ref().map(|g| ("d_shared_output_gate", &g[..])));
        }
        all
    }
}

/// Runs the layer on `x` `[tokens, hidden]` and, where `dy` `[tokens, hidden]` is given, its backward too.
///
/// # Errors
/// Where a size of `shape` is not allowed, or a slice does not have the length that the shape asks for.
pub fn layer<T: Element>(
    shape: &Shape,
    x: &[T],
    dy: Option<&[T]>,
    routing: &Routing,
    weights: &Weights<T>,
) -> Result<Outputs> {
    validate(shape, x, dy, routing, weights)?;
    let (h, i, tokens) = (shape.hidden, shape.intermediate, routing.tokens());
    let mut y = vec![0.0; tokens * h];
    let mut clamp_margin = f64::INFINITY;
    let mut gradients = dy.map(|_| Gradients {
        dx: vec![0.0; tokens * h],
        d_topk_weights: vec![0.0; tokens * shape.top_k],
        weights: zeros(shape),
    });

    let mut routes_of = vec![Vec::new(); shape.experts];
    for (route, &id) in routing.ids().iter().enumerate().filter(|(_, id)| **id >= 0) {
        routes_of[id as usize].push(route);
    }
    for (e, routes) in routes_of.iter().enumerate().filter(|(_, routes)| !routes.is_empty()) {
        let (inner, outer, matrix) = (e * i..(e + 1) * i, e * h..(e + 1) * h, e * i * h..(e + 1) * i * h);
        let expert = Expert {
            activation: shape.activation,
            hidden: h,
            intermediate: i,
            gate: &weights.gate[matrix.clone()],
            up: &weights.up[matrix.clone()],
            down: &weights.down[matrix.clone()],
            biases: weights.biases.map(|b| Biases {
                gate: &b.gate[inner.clone()],
                up: &b.up[inner.clone()],
                down: &b.down[outer.clone()],
            }),
        };
        let tokens: Vec<_> = routes.iter().map(|route| route / shape.top_k).collect();
        let w: Vec<_> = routes.iter().map(|&route| f64::from(routing.weights()[route])).collect();
        let rows = Rows { x: gather(x, &tokens, h), dy: dy.map(|dy| gather(dy, &tokens, h)), w };
        let out = expert.run(&rows);
        clamp_margin = clamp_margin.min(out.clamp_margin);
        scatter(&mut y, &out.y, &tokens, &rows.w, h);
        let (Some(all), Some(back)) = (&mut gradients, out.back) else {
            continue;
        };
        scatter(&mut all.dx, &back.dx, &tokens, &vec![1.0; tokens.len()], h);
        for (&route, dw) in routes.iter().zip(&back.dw) {
            all.d_topk_weights[route] = *dw;
        }
        all.weights.gate[matrix.clone()].copy_from_slice(&back.gate);
        all.weights.up[matrix.clone()].copy_from_slice(&back.up);
        all.weights.down[matrix].copy_from_slice(&back.down);
        if let Some(b) = &mut all.weights.biases {
            b.gate[inner.clone()].copy_from_slice(&back.biases.gate);
            b.up[inner].copy_from_slice(&back.biases.up);
            b.down[outer].copy_from_slice(&back.biases.down);
        }
    }

    if let (Some(sizes), Some(shared)) = (shape.shared, &weights.shared) {
        let expert = Expert {
            activation: shape.activation,
            hidden: h,
            intermediate: sizes.intermediate,
            gate: shared.gate,
            up: shared.up,
            down: shared.down,
            biases: None,
        };
        let tokens: Vec<_> = (0..tokens).collect();
        let x = gather(x, &tokens, h);
        let output_gate = shared.output_gate.map(widen::<f32>);
        let gate_of = |row: &[f64]| output_gate.as_ref().map_or(1.0, |gate| sigmoid(dot(row, gate)));
        let w = x.chunks_exact(h).map(gate_of).collect();
        let rows = Rows { x, dy: dy.map(|dy| gather(dy, &tokens, h)), w };
        let out = expert.run(&rows);
        clamp_margin = clamp_margin.min(out.clamp_margin);
        scatter(&mut y, &out.y, &tokens, &rows.w, h);
        if let (Some(all), Some(back)) = (&mut gradients, out.back) {
            scatter(&mut all.dx, &back.dx, &tokens, &vec![1.0; tokens.len()], h);
            let d_shared = all.weights.shared.as_mut().expect("made for this shape");
            (d_shared.gate, d_shared.up, d_shared.down) = (back.gate, back.up, back.down);
            if let (Some(d_gate), Some(gate)) = (&mut d_shared.output_gate, output_gate) {
                for t in tokens {
                    let (row, s) = (t * h..(t + 1) * h, rows.w[t]);
                    let slope = back.dw[t] * s * (1.0 - s);
                    axpy(&mut all.dx[row.clone()], slope, &gate);
                    axpy(d_gate, slope, &rows.x[row]);
                }
            }
        }
    }
    Ok(Outputs { y, gradients, clamp_margin })
}

fn validate<T: Element>(
    shape: &Shape,
    x: &[T],
    dy: Option<&[T]>,
    routing: &Routing,
    weights: &Weights<T>,
) -> Result<()> {
    shape.validate()?;
    weights.validate(shape)?;
    if routing.top_k() != shape.top_k {
        return Err(Error::invalid(
            "routing",
            format!("top-{}", routing.top_k()),
            format!("the shape has top-{}", shape.top_k),
        ));
    }
    if let Some(at) = routing.ids().iter().position(|&id| id >= shape.experts as i32) {
        let (token, slot) = (at / shape.top_k, at % shape.top_k);
        return Err(Error::ExpertId { token, slot, id: routing.ids()[at].into(), experts: shape.experts });
    }
    let dims = [("tokens", routing.tokens()), ("hidden", shape.hidden)];
    Error::check_len("x", x.len(), &dims)?;
    dy.map_or(Ok(()), |dy| Error::check_len("dy", dy.len(), &dims))
}

/// One expert's weights.
struct Expert<'a, T> {
    activation: Activation,
    hidden: usize,
    intermediate: usize,
    gate: &'a [T],                     // [intermediate, hidden]
    up: &'a [T],                       // [intermediate, hidden]
    down: &'a [T],                     // [hidden, intermediate]
    biases: Option<Biases<&'a [f32]>>, // [intermediate], [intermediate], [hidden]
}

/// The rows that an expert works on.
struct Rows {
    x: Vec<f64>,          // [rows, hidden]
    dy: Option<Vec<f64>>, // [rows, hidden]
    w: Vec<f64>,          // [rows]
}

struct Out {
    y: Vec<f64>, // [rows, hidden], not multiplied by w
    clamp_margin: f64,
    back: Option<Back>,
}

struct Back {
    dx: Vec<f64>,   // [rows, hidden]
    dw: Vec<f64>,   // [rows]
    gate: Vec<f64>, // as the weights
    up: Vec<f64>,
    down: Vec<f64>,
    biases: Biases<Vec<f64>>,
}

impl<T: Element> Expert<'_, T> {
    /// Loops over rows of a weight outside and rows of tokens inside: a weight is read and widened once a pass.
    fn run(&self, rows: &Rows) -> Out {
        let (h, i, n) = (self.hidden, self.intermediate, rows.w.len());
        let bias_gate = self.biases.map_or(vec![0.0; i], |b| widen(b.gate));
        let bias_up = self.biases.map_or(vec![0.0; i], |b| widen(b.up));
        let bias_down = self.biases.map_or(vec![0.0; h], |b| widen(b.down));
        let row = |r: usize, width: usize| r * width..(r + 1) * width;

        let (mut g, mut u) = (vec![0.0; n * i], vec![0.0; n * i]);
        for j in 0..i {
            let (gate, up) = (widen(&self.gate[row(j, h)]), widen(&self.up[row(j, h)]));
            for r in 0..n {
                let x = &rows.x[row(r, h)];
                g[r * i + j] = dot(x, &gate) + bias_gate[j];
                u[r * i + j] = dot(x, &up) + bias_up[j];
            }
        }
        let distance = |limit: f64| {
            let nearest = |v: &f64| (v.abs() - limit).abs() / limit;
            g.iter().filter(|g| **g > 0.0).chain(&u).map(nearest).fold(f64::INFINITY, f64::min)
        };
        let clamp_margin = self.activation.limit().map_or(f64::INFINITY, |limit| distance(f64::from(limit)));
        let hidden: Vec<_> = g.iter().zip(&u).map(|(&g, &u)| activate(self.activation, g, u).h).collect();
        let mut y = vec![0.0; n * h];
        let mut dh = vec![0.0; n * i];
        for o in 0..h {
            let down = widen(&self.down[row(o, i)]);
            for r in 0..n {
                y[r * h + o] = dot(&hidden[row(r, i)], &down) + bias_down[o];
                if let Some(dy) = &rows.dy {
                    axpy(&mut dh[row(r, i)], dy[r * h + o], &down);
                }
            }
        }
        let Some(dy) = &rows.dy else {
            return Out { y, clamp_margin, back: None };
        };

        let dw = (0..n)
            .map(|r| dot(&dh[row(r, i)], &hidden[row(r, i)]) + dot(&dy[row(r, h)], &bias_down))
            .collect();
        let mut d_down = vec![0.0; h * i];
        let mut d_biases = Biases { gate: vec![0.0; i], up: vec![0.0; i], down: vec![0.0; h] };
        for o in 0..h {
            for r in 0..n {
                let scaled = rows.w[r] * dy[r * h + o];
                axpy(&mut d_down[row(o, i)], scaled, &hidden[row(r, i)]);
                d_biases.down[o] += scaled;
            }
        }
        // From here on g and u hold their own gradients.
        for r in 0..n {
            for at in row(r, i) {
                let a = activate(self.activation, g[at], u[at]);
                let scaled = rows.w[r] * dh[at];
                (g[at], u[at]) = (scaled * a.dg, scaled * a.du);
            }
        }
        let mut dx = vec![0.0; n * h];
        let (mut d_gate, mut d_up) = (vec![0.0; i * h], vec![0.0; i * h]);
        for j in 0..i {
            let (gate, up) = (widen(&self.gate[row(j, h)]), widen(&self.up[row(j, h)]));
            for r in 0..n {
                let (dg, du, x) = (g[r * i + j], u[r * i + j], &rows.x[row(r, h)]);
                axpy(&mut dx[row(r, h)], dg, &gate);
                axpy(&mut dx[row(r, h)], du, &up);
                axpy(&mut d_gate[row(j, h)], dg, x);
                axpy(&mut d_up[row(j, h)], du, x);
                d_biases.gate[j] += dg;
                d_biases.up[j] += du;
            }
        }
        Out {
            y,
            clamp_margin,
            back: Some(Back { dx, dw, gate: d_gate, up: d_up, down: d_down, biases: d_biases }),
        }
    }
}

/// `h` and its derivatives.
struct Activated {
    h: f64,
    dg: f64,
    du: f64,
}

/// A derivative is 0 strictly beyond the clamp; a NaN is clamped by nothing.
fn activate(activation: Activation, g: f64, u: f64) -> Activated {
    let limit = activation.limit().map_or(f64::INFINITY, f64::from);
    let (alpha, offset) = (f64::from(activation.alpha()), f64::from(activation.up_offset()));
    let (g_clamped, u_clamped) = (g > limit, u.abs() > limit);
    let g = if g_clamped { limit } else { g };
    let u = if u_clamped { limit.copysign(u) } else { u };
    let s = sigmoid(alpha * g);
    Activated {
        h: (u + offset) * g * s,
        dg: if g_clamped { 0.0 } else { (u + offset) * s * (1.0 + alpha * g * (1.0 - s)) },
        du: if u_clamped { 0.0 } else { g * s },
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Partial sums that a dot product keeps, so that the compiler can widen the loop.
const LANES: usize = 8;

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

/// `to += scale * from`. A scale of 0 is no shortcut: 0 times infinity is NaN.
fn axpy(to: &mut [f64], scale: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += scale * from;
    }
}

fn widen<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|v| f64::from(v.to_f32())).collect()
}

fn gather<T: Element>(from: &[T], tokens: &[usize], width: usize) -> Vec<f64> {
    tokens.iter().flat_map(|t| widen(&from[t * width..(t + 1) * width])).collect()
}

fn scatter(to: &mut [f64], rows: &[f64], tokens: &[usize], scales: &[f64], width: usize) {
    for ((row, t), scale) in rows.chunks_exact(width).zip(tokens).zip(scales) {
        axpy(&mut to[t * width..(t + 1) * width], *scale, row);
    }
}

fn zeros(shape: &Shape) -> WeightGradients<Vec<f64>> {
    let (h, i, e) = (shape.hidden, shape.intermediate, shape.experts);
    let matrix = || vec![0.0; e * i * h];
    WeightGradients {
        gate: matrix(),
        up: matrix(),
        down: matrix(),
        biases: shape.biases.then(|| Biases {
            gate: vec![0.0; e * i],
            up: vec![0.0; e * i],
            down: vec![0.0; e * h],
        }),
        shared: shape.shared.map(|s| SharedWeights {
            gate: vec![0.0; s.intermediate * h],
            up: vec![0.0; s.intermediate * h],
            down: vec![0.0; s.intermediate * h],
            output_gate: s.output_gate.then(|| vec![0.0; h]),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shared;

    /// SplitMix64, as numbers in -1..1.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f32 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
        }

        fn list(&mut self, n: usize, scale: f32) -> Vec<f32> {
            (0..n).map(|_| scale * self.next()).collect()
        }
    }

    /// All inputs of one step; `Vec`s so that a test can move one number.
    #[derive(Clone)]
    struct Step {
        shape: Shape,
        ids: Vec<i32>,
        /// x, topk_weights, then the weights in the order of [`Outputs::named`].
        inputs: Vec<(&'static str, Vec<f32>)>,
    }

    impl Step {
        fn new(shape: Shape, ids: Vec<i32>, random: &mut Random) -> Self {
            let (h, i, e, tokens) =
                (shape.hidden, shape.intermediate, shape.experts, ids.len() / shape.top_k);
            let mut inputs = vec![
                ("dx", random.list(tokens * h, 1.0)),
                ("d_topk_weights", random.list(ids.len(), 1.0)),
                ("dw_gate", random.list(e * i * h, 1.0)),
                ("dw_up", random.list(e * i * h, 1.0)),
                ("dw_down", random.list(e * i * h, 1.0)),
            ];
            if shape.biases {
                inputs.push(("db_gate", random.list(e * i, 0.5)));
                inputs.push(("db_up", random.list(e * i, 0.5)));
                inputs.push(("db_down", random.list(e * h, 0.5)));
            }
            if let Some(s) = shape.shared {
                let n = s.intermediate * h;
                inputs.push(("d_shared_gate", random.list(n, 1.0)));
                inputs.push(("d_shared_up", random.list(n, 1.0)));
                inputs.push(("d_shared_down", random.list(n, 1.0)));
                if s.output_gate {
                    inputs.push(("d_shared_output_gate", random.list(h, 1.0)));
                }
            }
            Step { shape, ids, inputs }
        }

        fn get(&self, name: &str) -> Option<&[f32]> {
            self.inputs.iter().find(|(n, _)| *n == name).map(|(_, v)| &v[..])
        }

        fn run(&self, dy: Option<&[f32]>) -> Outputs {
            let get = |name| self.get(name).unwrap();
            let tokens = self.ids.len() / self.shape.top_k;
            let routing = Routing::new(&self.shape, &self.ids, get("d_topk_weights"), &[tokens]).unwrap();
            let weights = Weights {
                gate: get("dw_gate"),
                up: get("dw_up"),
                down: get("dw_down"),
                biases: self.shape.biases.then(|| Biases {
                    gate: get("db_gate"),
                    up: get("db_up"),
                    down: get("db_down"),
                }),
                shared: self.shape.shared.map(|s| SharedWeights {
                    gate: get("d_shared_gate"),
                    up: get("d_shared_up"),
                    down: get("d_shared_down"),
                    output_gate: s.output_gate.then(|| get("d_shared_output_gate")),
                }),
            };
            layer(&self.shape, get("dx"), dy, &routing, &weights).unwrap()
        }

        /// `dy . y`, the number that all gradients are of.
        fn loss(&self, dy: &[f32]) -> f64 {
            self.run(None).y.iter().zip(dy).map(|(y, dy)| y * f64::from(*dy)).sum()
        }
    }

    fn options() -> Vec<(&'static str, Shape)> {
        let plain = Shape::new(8, 16, 4, 3);
        let oai = |limit| Activation::SwiGluOai { alpha: 1.702, limit };
        vec![
            ("plain", plain.clone()),
            ("clamped", Shape { activation: Activation::SwiGlu { limit: Some(0.7) }, ..plain.clone() }),
            ("gpt-oss", Shape { activation: oai(Some(0.7)), biases: true, ..plain.clone() }),
            ("alpha", Shape { activation: oai(None), ..plain.clone() }),
            ("biases", Shape { biases: true, ..plain.clone() }),
            (
                "shared",
                Shape { shared: Some(Shared { intermediate: 24, output_gate: false }), ..plain.clone() },
            ),
            (
                "all",
                Shape {
                    shared: Some(Shared { intermediate: 8, output_gate: true }),
                    activation: oai(Some(1.1)),
                    biases: true,
                    ..plain
                },
            ),
        ]
    }

    /// Routes with -1, a token without any, a duplicate, an expert (2) without rows.
    const IDS: [i32; 15] = [0, 1, 3, 3, -1, 3, -1, -1, -1, 1, 1, 0, 3, 0, -1];

    #[test]
    fn gradients_are_central_differences_of_the_forward() {
        let mut random = Random(1);
        for (name, shape) in options() {
            let step = Step::new(shape, IDS.to_vec(), &mut random);
            let dy = random.list(5 * step.shape.hidden, 1.0);
            let outputs = step.run(Some(&dy));
            let (mut worst, mut at) = (0.0, String::new());
            for (tensor, (input, values)) in step.inputs.iter().enumerate() {
                let named = outputs.named();
                let (_, gradient) = named.iter().find(|(n, _)| n == input).unwrap();
                assert_eq!(gradient.len(), values.len(), "{input}");
                for i in 0..values.len() {
                    // Steps so small that no argument crosses a clamp on the way.
                    let moved = |by: f32| {
                        let mut step = step.clone();
                        step.inputs[tensor].1[i] += by;
                        (f64::from(step.inputs[tensor].1[i]), step.loss(&dy))
                    };
                    let (((a, la), (b, lb)), ((c, lc), (d, ld))) = (
                        (moved(-1.0 / 131072.0), moved(1.0 / 131072.0)),
                        (moved(-1.0 / 65536.0), moved(1.0 / 65536.0)),
                    );
                    // Richardson: the error of a central difference falls with the square of the step.
                    let numeric = (4.0 * (lb - la) / (b - a) - (ld - lc) / (d - c)) / 3.0;
                    let error = (numeric - gradient[i]).abs();
                    if error > worst {
                        (worst, at) = (error, format!("{input}[{i}]: {} and {numeric}", gradient[i]));
                    }
                }
            }
            println!("{name}: largest difference {worst:.2e} at {at}");
            assert!(worst < 2e-9, "{name}: {worst:e} at {at}");
        }
    }

    #[test]
    fn clamp_passes_at_the_limit_and_stops_beyond_it() {
        let limit = 0.5_f32;
        let act = Activation::SwiGlu { limit: Some(limit) };
        let next = f64::from(limit) * (1.0 + f64::EPSILON);
        let [at, beyond] = [f64::from(limit), next].map(|g| activate(act, g, 0.25).dg);
        assert!(at > 0.0 && beyond == 0.0, "{at} {beyond}");
        for sign in [1.0, -1.0] {
            let [at, beyond] = [f64::from(limit), next].map(|u| activate(act, 0.25, sign * u));
            assert!(at.du > 0.0 && beyond.du == 0.0 && at.h == beyond.h, "{} {}", at.du, beyond.du);
        }
        assert!(activate(act, -9.0, 0.25).dg != 0.0, "g has no lower clamp");
        let (identity, x) =
            ([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0_f32], [-0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let margin = |gate: f32, up: f32| {
            let scaled = |by: f32| (0..8).flat_map(|_| identity.map(|v| v * by)).collect::<Vec<_>>();
            let (gate, up, down) = (scaled(gate), scaled(up), scaled(1.0));
            let weights = Weights { gate: &gate, up: &up, down: &down, biases: None, shared: None };
            let shape = Shape { activation: act, ..Shape::new(8, 8, 1, 1) };
            let routing = Routing::new(&shape, &[0], &[1.0], &[1]).unwrap();
            layer(&shape, &x, None, &routing, &weights).unwrap().clamp_margin
        };
        // g and u are -0.5 times these, the limit is 0.5.
        assert_eq!((margin(1.0, 0.5), margin(-1.25, 0.5), margin(0.0, 1.0)), (0.5, 0.25, 0.0));
        assert!(activate(act, f64::NAN, 0.0).h.is_nan() && activate(act, 0.0, f64::NAN).h.is_nan());
    }

    #[test]
    fn no_route_gives_nothing_and_a_duplicate_counts_twice() {
        let mut random = Random(2);
        let step = Step::new(Shape::new(8, 8, 4, 3), IDS.to_vec(), &mut random);
        let dy = random.list(5 * 8, 1.0);
        let out = step.run(Some(&dy));
        let gradients = out.gradients.unwrap();
        assert!(out.y[16..24].iter().chain(&gradients.dx[16..24]).all(|v| *v == 0.0), "token 2 has no route");
        for (route, id) in IDS.iter().enumerate() {
            assert_eq!(*id == -1, gradients.d_topk_weights[route] == 0.0, "route {route}");
        }
        assert!(gradients.weights.gate[2 * 64..3 * 64].iter().all(|v| *v == 0.0), "expert 2 has no rows");
        // Token 3: expert 1 twice is expert 1 once with the sum of both weights.
        let mut merged = step.clone();
        merged.ids[10] = -1;
        merged.inputs[1].1[9] = step.inputs[1].1[9] + step.inputs[1].1[10];
        let y = merged.run(None).y;
        let worst = (24..32).map(|i| (y[i] - out.y[i]).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-6, "{worst:e}");
    }

    #[test]
    fn refuses_a_slice_of_the_wrong_length() {
        let step = Step::new(Shape::new(8, 8, 4, 3), IDS.to_vec(), &mut Random(3));
        let routing = Routing::new(&step.shape, &IDS, step.get("d_topk_weights").unwrap(), &[5]).unwrap();
        let w = step.get("dw_gate").unwrap();
        let weights = Weights { gate: w, up: w, down: w, biases: None, shared: None };
        let x = step.get("dx").unwrap();
        for (x, dy, word) in [(&x[1..], None, "x has 39"), (x, Some(&x[2..]), "dy has 38")] {
            let error = layer(&step.shape, x, dy, &routing, &weights).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
