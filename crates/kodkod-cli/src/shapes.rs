//! Published MoE layer shapes, by name. Source of the sizes: each model's public configuration file.

use std::str::FromStr;

use kodkod::{Activation, Shape, Shared};

/// What one published configuration says.
struct Published {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
    /// Shared experts, each `intermediate` wide.
    shared: usize,
    rest: Rest,
}

/// What some configurations have beyond sizes.
enum Rest {
    Plain,
    /// A clamp of the activation.
    Limit(f32),
    /// gpt-oss: biases, alpha 1.702, limit 7.
    GptOss,
    /// A sigmoid output gate of the shared experts.
    OutputGate,
}

const fn row(
    name: &'static str,
    [hidden, intermediate, experts, top_k, shared]: [usize; 5],
    rest: Rest,
) -> Published {
    Published { name, hidden, intermediate, experts, top_k, shared, rest }
}

/// Sizes are `[hidden, intermediate, experts, top_k, shared experts]`.
const PUBLISHED: [Published; 16] = [
    row("olmoe-1b-7b", [2048, 1024, 64, 8, 0], Rest::Plain),
    row("qwen3-30b-a3b", [2048, 768, 128, 8, 0], Rest::Plain),
    row("qwen3-235b-a22b", [4096, 1536, 128, 8, 0], Rest::Plain),
    row("mixtral-8x7b", [4096, 14336, 8, 2, 0], Rest::Plain),
    row("gpt-oss-20b", [2880, 2880, 32, 4, 0], Rest::GptOss),
    row("deepseek-v2-lite", [2048, 1408, 64, 6, 2], Rest::Plain),
    row("deepseek-v3", [7168, 2048, 256, 8, 1], Rest::Plain),
    row("deepseek-v4-flash", [4096, 2048, 256, 6, 1], Rest::Limit(10.0)),
    row("deepseek-v4-pro", [7168, 3072, 384, 6, 1], Rest::Limit(10.0)),
    row("kimi-k2", [7168, 2048, 384, 8, 1], Rest::Plain),
    row("glm-4.5-air", [4096, 1408, 128, 8, 1], Rest::Plain),
    row("glm-5", [6144, 2048, 256, 8, 1], Rest::Plain),
    row("qwen3.5-397b-a17b", [4096, 1024, 512, 10, 1], Rest::OutputGate),
    row("nemotron-3-nano", [2688, 1856, 128, 6, 1], Rest::Plain),
    // An expert-parallel rank's share of the big shapes, 64 ranks or so: for one or two cards.
    row("kimi-slice", [7168, 2048, 12, 8, 0], Rest::Plain),
    row("deepseek-v3-slice", [7168, 2048, 16, 8, 0], Rest::Plain),
];

impl Published {
    fn shape(&self) -> Shape {
        let mut shape = Shape::new(self.hidden, self.intermediate, self.experts, self.top_k);
        if self.shared > 0 {
            let output_gate = matches!(self.rest, Rest::OutputGate);
            shape.shared = Some(Shared { intermediate: self.shared * self.intermediate, output_gate });
        }
        match self.rest {
            Rest::Limit(limit) => shape.activation = Activation::SwiGlu { limit: Some(limit) },
            Rest::GptOss => {
                shape.activation = Activation::SwiGluOai { alpha: 1.702, limit: Some(7.0) };
                shape.biases = true;
            }
            Rest::Plain | Rest::OutputGate => {}
        }
        shape
    }
}

/// A shape and what the user called it: a published name, or HxIxExK.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NamedShape {
    pub(crate) name: String,
    pub(crate) shape: Shape,
}

impl FromStr for NamedShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shape = match PUBLISHED.iter().find(|p| p.name == text) {
            Some(published) => published.shape(),
            None => {
                let sizes: Option<Vec<usize>> = text.split('x').map(|size| size.parse().ok()).collect();
                let Some(&[hidden, intermediate, experts, top_k]) = sizes.as_deref() else {
                    let names: Vec<_> = PUBLISHED.iter().map(|p| p.name).collect();
                    return Err(format!(
                        "allowed are HIDDENxINTERMEDIATExEXPERTSxTOP_K, such as 1024x512x32x4, and {}",
                        names.join(", ")
                    ));
                };
                Shape::new(hidden, intermediate, experts, top_k)
            }
        };
        shape.validate().map_err(|error| error.to_string())?;
        Ok(NamedShape { name: text.into(), shape })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kodkod::Knobs;

    #[test]
    fn every_published_shape_is_valid_and_has_valid_default_knobs() {
        for published in &PUBLISHED {
            let shape: NamedShape = published.name.parse().unwrap();
            let knobs = Knobs::for_shape(&shape.shape);
            println!("{}: {knobs:?}", published.name);
            knobs.validate().unwrap();
        }
    }

    #[test]
    fn sizes_parse_and_a_bad_name_lists_what_is_allowed() {
        let shape: NamedShape = "64x32x4x2".parse().unwrap();
        assert_eq!(shape.shape, Shape::new(64, 32, 4, 2));
        let error = "olmo".parse::<NamedShape>().unwrap_err();
        println!("{error}");
        assert!(error.contains("olmoe-1b-7b") && error.contains("1024x512x32x4"));
        for bad in ["64x32x4", "64x32x4x2x1", "60x32x4x2", "64x32x0x2", "64x32x4x33", "x", ""] {
            assert!(bad.parse::<NamedShape>().is_err(), "{bad}");
        }
    }
}
