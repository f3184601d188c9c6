//! The stamps of a pass: sums of each kind of task, Chrome's trace format (for Perfetto), and an SVG timeline, one row
//! an SM.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::layer::Stamp;

/// All tasks of one kind. Times are sums over the tasks, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindTimes {
    /// Name of the tasks.
    pub kind: &'static str,
    /// How many.
    pub tasks: usize,
    /// From begin to end.
    pub total: u64,
    /// Waiting for the first operands, product, epilogue; none where the tasks have no product.
    pub parts: Option<[u64; 3]>,
}

/// Sums by kind, the longest first.
pub fn by_kind(stamps: &[Stamp]) -> Vec<KindTimes> {
    let mut all: Vec<KindTimes> = Vec::new();
    for s in stamps {
        let at = all.iter().position(|k| k.kind == s.kind).unwrap_or_else(|| {
            all.push(KindTimes { kind: s.kind, tasks: 0, total: 0, parts: None });
            all.len() - 1
        });
        let sums = &mut all[at];
        sums.tasks += 1;
        sums.total += s.end.saturating_sub(s.begin);
        if let Some(parts) = parts(s) {
            let sums = sums.parts.get_or_insert([0; 3]);
            sums.iter_mut().zip(parts).for_each(|(sum, (_, begin, end))| *sum += end.saturating_sub(begin));
        }
    }
    all.sort_by_key(|k| std::cmp::Reverse(k.total));
    all
}

/// Nanoseconds from the first begin to the last end.
pub fn span(stamps: &[Stamp]) -> u64 {
    let begin = stamps.iter().map(|s| s.begin).min().unwrap_or(0);
    stamps.iter().map(|s| s.end).max().unwrap_or(0).saturating_sub(begin)
}

/// Name, begin and end of the three parts of a task with a product.
fn parts(s: &Stamp) -> Option<[(&'static str, u64, u64); 3]> {
    (s.product != 0).then_some([
        ("wait", s.begin, s.loaded),
        ("product", s.loaded, s.product),
        ("epilogue", s.product, s.end),
    ])
}

/// Microseconds from the first task's begin.
fn microseconds(stamps: &[Stamp]) -> impl Fn(u64) -> f64 {
    let start = stamps.iter().map(|s| s.begin).min().unwrap_or(0);
    move |t| t.saturating_sub(start) as f64 / 1e3
}

/// Chrome's trace format: a process a rank, a thread an SM, times in microseconds; within a task with a product three
/// slices, `wait` (for the first operands), `product` and `epilogue`.
pub fn chrome_json(stamps: &[Stamp]) -> String {
    let us = microseconds(stamps);
    let slice = |s: &Stamp, name: &str, begin: u64, end: u64, rest: &str| {
        format!(
            r#"{{"name":"{name}","ph":"X","pid":{},"tid":{},"ts":{:.3},"dur":{:.3}{rest}}}"#,
            s.rank,
            s.sm,
            us(begin),
            end.saturating_sub(begin) as f64 / 1e3,
        )
    };
    let mut events = Vec::new();
    // How the rows are called.
    for rank in stamps.iter().map(|s| s.rank).collect::<BTreeSet<_>>() {
        events.push(format!(
            r#"{{"name":"process_name","ph":"M","pid":{rank},"args":{{"name":"rank {rank}"}}}}"#
        ));
    }
    for (rank, sm) in stamps.iter().map(|s| (s.rank, s.sm)).collect::<BTreeSet<_>>() {
        events.push(format!(
            r#"{{"name":"thread_name","ph":"M","pid":{rank},"tid":{sm},"args":{{"name":"SM {sm}"}}}}"#
        ));
    }
    for s in stamps {
        let rest = format!(r#","args":{{"place":{:?},"cta":{}}}"#, s.place, s.cta);
        events.push(slice(s, s.kind, s.begin, s.end, &rest));
        let inner = parts(s).into_iter().flatten();
        events.extend(inner.map(|(name, begin, end)| slice(s, name, begin, end, "")));
    }
    format!("{{\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
}

/// A timeline: a row an SM, a colour a kind of task, pale while it waits for its first operands.
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
        let mut draw = |begin: u64, end: u64, rest: &str| {
            let _ = writeln!(
                out,
                "<rect x=\"{:.2}\" y=\"{}\" width=\"{:.2}\" height=\"{}\" fill=\"{}\"{rest}/>",
                LEFT + us(begin) * scale,
                TOP + ROW * row,
                (us(end) - us(begin)) * scale,
                ROW - 1.0,
                colour(s.kind)
            );
        };
        // A wait that nobody could see is not drawn apart.
        let waits = s.product != 0 && (us(s.loaded) - us(s.begin)) * scale > 0.1;
        if waits {
            draw(s.begin, s.loaded, " opacity=\"0.35\"");
        }
        draw(if waits { s.loaded } else { s.begin }, s.end, "");
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

    /// `loaded` and `product` are 0 where there is no product.
    fn stamp([begin, loaded, product, end]: [u64; 4], kind: &'static str, sm: u32) -> Stamp {
        Stamp { rank: 1, begin, loaded, product, end, cycles: 0, kind, place: [3, 4], sm, cta: 7 }
    }

    fn stamps() -> [Stamp; 3] {
        [
            stamp([5_000, 5_500, 7_000, 7_500], "Down", 2),
            stamp([4_000, 0, 0, 5_000], "Pull", 130),
            stamp([4_000, 4_100, 4_800, 5_000], "Down", 2),
        ]
    }

    #[test]
    fn draws_each_task_once_from_the_first_begin() {
        let json = chrome_json(&stamps());
        println!("{json}");
        assert!(json.contains(
            r#"{"name":"Down","ph":"X","pid":1,"tid":2,"ts":1.000,"dur":2.500,"args":{"place":[3, 4],"cta":7}}"#
        ));
        assert!(json.contains(r#""name":"Pull","ph":"X","pid":1,"tid":130,"ts":0.000"#));
        assert!(json.contains(r#""name":"product","ph":"X","pid":1,"tid":2,"ts":1.500,"dur":1.500}"#));
        assert!(json.contains(r#""tid":130,"args":{"name":"SM 130"}"#));
        let events = json.matches(r#""ph":"#).count();
        assert_eq!(events, 3 + 3 + 2 * 3, "names of rank and two SMs, three tasks, parts of two");
        let svg = svg(&stamps());
        println!("{svg}");
        assert_eq!(svg.matches("<rect").count(), 7, "two of the legend, three tasks, two waits");
        // 3.5 us are 1600 pixels: the second Down begins after 1 us, in the upper row.
        assert!(svg.contains("<rect x=\"497.14\" y=\"40\" width=\"228.57\""), "place of Down's wait");
        assert_eq!(chrome_json(&[]).matches("name").count(), 0);
    }

    #[test]
    fn sums_by_kind_with_their_parts() {
        let kinds = by_kind(&stamps());
        println!("{kinds:?}");
        let down = KindTimes { kind: "Down", tasks: 2, total: 3_500, parts: Some([600, 2_200, 700]) };
        assert_eq!(kinds, [down, KindTimes { kind: "Pull", tasks: 1, total: 1_000, parts: None }]);
        assert_eq!(span(&stamps()), 3_500);
        assert_eq!((by_kind(&[]), span(&[])), (vec![], 0));
    }
}
