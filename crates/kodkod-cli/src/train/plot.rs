//! The loss curve as SVG.

use std::path::Path;

use anyhow::{Context, Result};
use plotters::prelude::*;

use super::checkpoint::History;

/// A horizontal mark: its label and its bits per byte.
pub(crate) type Mark<'a> = (&'a str, f64);

const TRAIN: RGBColor = RGBColor(38, 92, 160);
const HELD_OUT: RGBColor = RGBColor(214, 96, 36);
const GREY: RGBColor = RGBColor(110, 110, 110);

/// Draws the training loss of every step (pale) and its moving mean, the held-out points, and marks to compare with.
pub(crate) fn draw(path: &Path, history: &History, marks: &[Mark]) -> Result<()> {
    render(path, history, marks).with_context(|| format!("--out: cannot draw {}", path.display()))
}

fn render(path: &Path, history: &History, marks: &[Mark]) -> Result<()> {
    let bits: Vec<f64> =
        history.losses.iter().map(|&nats| f64::from(nats) / std::f64::consts::LN_2).collect();
    let steps = bits.len() as f64;
    let held_out: Vec<(f64, f64)> =
        history.held_out.iter().map(|&(s, b)| (f64::from(s), f64::from(b))).collect();
    let low = bits.iter().chain(held_out.iter().map(|(_, b)| b)).chain(marks.iter().map(|(_, b)| b));
    let low = low.copied().fold(f64::INFINITY, f64::min);
    // The first steps start at 8 bits and more: what matters lies below 5.
    let top = bits.first().copied().unwrap_or(8.0).clamp(low + 1.0, 5.0_f64.max(low + 1.0));
    let bottom = (low - 0.25).max(0.0);

    let root = SVGBackend::new(path, (960, 560)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Bits per byte while training", ("sans-serif", 22).into_font())
        .margin(18)
        .margin_right(28)
        .x_label_area_size(48)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..steps.max(1.0), bottom..top)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("bits per byte")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.1}"))
        .axis_desc_style(("sans-serif", 16))
        .label_style(("sans-serif", 14))
        .bold_line_style(BLACK.mix(0.12))
        .light_line_style(TRANSPARENT)
        .axis_style(BLACK.mix(0.5))
        .draw()?;

    for (label, level) in marks.iter().filter(|(_, level)| (bottom..top).contains(level)) {
        let line = [(0.0, *level), (steps.max(1.0), *level)];
        chart.draw_series(DashedLineSeries::new(line, 6, 5, GREY.stroke_width(1)))?;
        let style = TextStyle::from(("sans-serif", 14)).color(&GREY);
        let label = format!("{label} {level:.3}");
        let above = level + (top - bottom) * 0.042;
        chart.draw_series([Text::new(label, (steps * 0.875, above), style)])?;
    }
    let visible = |points: Vec<(f64, f64)>| points.into_iter().filter(move |(_, bits)| *bits <= top);
    let points = (1..).map(f64::from).zip(bits.iter().copied()).collect();
    chart.draw_series(LineSeries::new(visible(points), TRAIN.mix(0.25).stroke_width(1)))?;
    chart
        .draw_series(LineSeries::new(visible(moving_mean(&bits)), TRAIN.stroke_width(2)))?
        .label("training, moving mean")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 22, y)], TRAIN.stroke_width(2)));
    let inside = held_out.iter().filter(|(_, b)| *b < top);
    chart
        .draw_series(inside.map(|&point| Circle::new(point, 4, HELD_OUT.filled())))?
        .label("held out, a sample")
        .legend(|(x, y)| Circle::new((x + 11, y), 4, HELD_OUT.filled()));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.2))
        .label_font(("sans-serif", 15))
        .margin(12)
        .draw()?;
    root.present()?;
    Ok(())
}

/// Means of windows of a fortieth of all steps, each at its window's middle.
fn moving_mean(values: &[f64]) -> Vec<(f64, f64)> {
    let width = (values.len() / 40).max(1);
    let mean = |(i, window): (usize, &[f64])| {
        (i as f64 + (width + 1) as f64 / 2.0, window.iter().sum::<f64>() / width as f64)
    };
    values.windows(width).enumerate().map(mean).collect()
}
