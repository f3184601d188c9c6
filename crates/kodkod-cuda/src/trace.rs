//! The stamps of a pass as pictures: Chrome's trace format (for Perfetto) and an SVG timeline, one row an SM.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::layer::Stamp;

/// Microseconds from the first task's begin.
fn microseconds(stamps: &[Stamp]) -> impl Fn(u64) -> f64 {
    let start = stamps.iter().map(|s| s.begin).min().unwrap_or(0);
    move |t| t.saturating_sub(start) as f64 / 1e3
}

/// Chrome's trace format: a process a rank, a thread an SM, times in microseconds.
pub fn chrome_json(stamps: &[Stamp]) -> String {
    let us = microseconds(stamps);
    let events: Vec<_> = stamps
        .iter()
        .map(|s| {
            format!(
                r#"{{"name":"{}","ph":"X","pid":{},"tid":{},"ts":{:.3},"dur":{:.3},"args":{{"place":{:?},"cta":{}}}}}"#,
                s.kind,
                s.rank,
                s.sm,
                us(s.begin),
                us(s.end) - us(s.begin),
                s.place,
                s.cta
            )
        })
        .collect();
    format!("{{\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
}

/// A timeline: a row an SM, a colour a kind of task.
pub fn svg(stamps: &[Stamp]) -> String {
    const COLOURS: [&str; 12] = [
        "#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f",
        "#bab0ac", "#2f4b7c", "#a05195",
    ];
    // In pixels.
    const WIDTH: f64 = 1600.0;
    const ROW: f64 = 5.0;
    const TOP: f64 = 40.0;
    const LEFT: f64 = 40.0;
    let us = microseconds(stamps);
    let kinds: Vec<_> = stamps.iter().map(|s| s.kind).collect::<BTreeSet<_>>().into_iter().collect();
    let sms: Vec<_> = stamps.iter().map(|s| s.sm).collect::<BTreeSet<_>>().into_iter().collect();
    let colour = |kind: &str| COLOURS[kinds.iter().position(|k| *k == kind).unwrap_or(0) % COLOURS.len()];
    let total = stamps.iter().map(|s| us(s.end)).fold(1.0, f64::max);
    let (scale, bottom) = (WIDTH / total, TOP + ROW * sms.len() as f64);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" font-family=\"sans-serif\" font-size=\"11\">\n",
        WIDTH + 2.0 * LEFT,
        bottom + 30.0
    );
    // Writing to a string does not fail.
    for (i, kind) in kinds.iter().enumerate() {
        let x = LEFT + 125.0 * i as f64;
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"8\" width=\"10\" height=\"10\" fill=\"{}\"/><text x=\"{}\" y=\"17\">{kind}</text>",
            colour(kind),
            x + 14.0
        );
    }
    for s in stamps {
        let row = sms.iter().position(|&sm| sm == s.sm).unwrap_or(0) as f64;
        let _ = writeln!(
            out,
            "<rect x=\"{:.2}\" y=\"{}\" width=\"{:.2}\" height=\"{}\" fill=\"{}\"/>",
            LEFT + us(s.begin) * scale,
            TOP + ROW * row,
            (us(s.end) - us(s.begin)) * scale,
            ROW - 1.0,
            colour(s.kind)
        );
    }
    for i in 0..=10 {
        let at = total * f64::from(i) / 10.0;
        let _ = writeln!(
            out,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{at:.0} us</text>",
            LEFT + at * scale,
            bottom + 18.0
        );
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_each_task_once_from_the_first_begin() {
        let stamp = |begin, end, kind, sm| Stamp { rank: 1, begin, end, kind, place: [3, 4], sm, cta: 7 };
        let stamps = [stamp(5_000, 7_500, "Down", 2), stamp(4_000, 5_000, "GateUp", 130)];
        let json = chrome_json(&stamps);
        println!("{json}");
        assert!(json.contains(
            r#"{"name":"Down","ph":"X","pid":1,"tid":2,"ts":1.000,"dur":2.500,"args":{"place":[3, 4],"cta":7}}"#
        ));
        assert!(json.contains(r#""name":"GateUp","ph":"X","pid":1,"tid":130,"ts":0.000"#));
        let svg = svg(&stamps);
        println!("{svg}");
        assert_eq!(svg.matches("<rect").count(), 4, "two of the legend, two tasks");
        // 3.5 us are 1600 pixels: Down begins after 1 us, in the upper row.
        assert!(svg.contains("<rect x=\"497.14\" y=\"40\" width=\"1142.86\""), "place of Down");
        assert_eq!(chrome_json(&[]).matches("name").count(), 0);
    }
}
