//! What the calls of a group of processes have in common, whatever their ranks run on: each says what its call is, all see
//! whether they agree, and what goes wrong is an error on every rank.

use std::time::Duration;

use kodkod_core::{Error, Knobs, Precision, Result, Routing, Shape, Stall};

use super::link::{Broken, Link};

/// This process as a rank of a group: see [`Processes::join`]. Every call of a group is made on all its ranks, in the same
/// order:
///
/// ```text
/// usable                 unless the group is broken
///   agree                all say what their call is; refused or given to all alike
///   ...                  meet and exchange, as often on every rank
/// settle                 remembers what broke the group
/// ```
pub struct Processes {
    pub(super) link: Link,
    rank: usize,
    ranks: usize,
    /// Calls so far: the same number on every rank.
    calls: u64,
    broken: Option<String>,
}

/// What a rank's note begins with that refuses a call.
const REFUSED: &str = "refused";

/// How a call fails.
pub enum Fault {
    /// On every rank alike, before anything was computed: the group goes on.
    Refused(Error),
    /// The group is at its end.
    Broken(Error),
}

impl From<Broken> for Fault {
    fn from(Broken(error): Broken) -> Self {
        Fault::Broken(error)
    }
}

/// Names and values that must be the same on every rank.
pub type Facts = Vec<(&'static str, String)>;

impl Processes {
    /// Meets the others of `ranks` ranks, within `limit`, in a file that `name` stands for. Every later wait has that limit
    /// too.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an argument that is out of range; [`Error::Machine`] that names the ranks which did not come,
    /// or what they disagree in.
    pub fn join(rank: usize, ranks: usize, name: &str, limit: Duration) -> Result<Self> {
        if rank >= ranks {
            return Err(Error::invalid(
                "rank",
                rank,
                format!("0 to {} are allowed", ranks.saturating_sub(1)),
            ));
        }
        if limit.is_zero() {
            return Err(Error::invalid("wait_limit", "0", "a positive time is needed"));
        }
        let link = Link::join(rank, ranks, name, limit)?;
        Ok(Processes { link, rank, ranks, calls: 0, broken: None })
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The number of the last call that was announced.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Whether a call may be made.
    ///
    /// # Errors
    /// Why the group is broken, or that this process is a fork of the one that joined.
    pub fn usable(&self) -> Result<()> {
        if !self.link.is_own_process() {
            let why =
                "a fork of the process that joined the group cannot use it: join another in the new process";
            return Err(Error::Machine(why.into()));
        }
        match &self.broken {
            Some(why) => Err(Error::Machine(format!("the group of processes is broken: {why}"))),
            None => Ok(()),
        }
    }

    /// The outcome of a call, with what broke the group remembered for the next.
    pub fn settle<R>(&mut self, outcome: Result<R, Fault>) -> Result<R> {
        outcome.map_err(|fault| match fault {
            Fault::Refused(error) => error,
            Fault::Broken(error) => {
                self.broken = Some(error.to_string());
                error
            }
        })
    }

    /// Begins a call: announces this rank's, its tokens or why it is refused, and gives the tokens of all ranks, and what
    /// each says beside (`also`, without tabs and newlines), where none refuses and all facts are the same.
    pub fn agree(
        &mut self,
        what: &str,
        own: Result<usize, &Error>,
        also: &str,
        facts: &Facts,
    ) -> Result<(Vec<usize>, Vec<String>), Fault> {
        let notes = self.announce(what, own, also, facts);
        // Its own reason is of more use to a caller than another's.
        let notes = match own {
            Err(error) => return Err(Fault::Refused(error.clone())),
            Ok(_) => notes?,
        };
        Self::agreed(&notes)
    }

    /// Says what this rank's call is, and hears what the others' are.
    fn announce(
        &mut self,
        what: &str,
        own: Result<usize, &Error>,
        also: &str,
        facts: &Facts,
    ) -> Result<Vec<String>, Broken> {
        self.calls += 1;
        let mut note = match own {
            Ok(tokens) => format!("tokens\t{tokens}\t{also}"),
            Err(error) => format!("{REFUSED}\t{}", error.to_string().replace(['\t', '\n'], " ")),
        };
        facts.iter().for_each(|(name, value)| note += &format!("\n{name}\t{value}"));
        self.link.announce(self.calls, what, &note)
    }

    /// The tokens of all ranks, and what each says beside, or the first refusal.
    fn agreed(notes: &[String]) -> Result<(Vec<usize>, Vec<String>), Fault> {
        let (mut tokens, mut others_say) = (Vec::new(), Vec::new());
        for (rank, note) in notes.iter().enumerate() {
            let (kind, rest) = note.split_once('\t').unwrap_or_default();
            let rest = rest.split('\n').next().unwrap_or_default();
            if kind == REFUSED {
                let argument = format!("the call of rank {rank}");
                return Err(Fault::Refused(Error::invalid(argument, "refused", rest)));
            }
            let (count, says) = rest.split_once('\t').unwrap_or_default();
            tokens.push(count.parse().unwrap_or(0));
            others_say.push(says.to_owned());
        }
        let mut others = notes.iter().enumerate().skip(1);
        let differ = others.find_map(|(rank, note)| {
            let mut pairs = notes[0].split('\n').zip(note.split('\n')).skip(1);
            let (first, other) = pairs.find(|(a, b)| a != b)?;
            let (name, first) = first.split_once('\t').unwrap_or_default();
            let (_, other) = other.split_once('\t').unwrap_or_default();
            let allowed = format!("rank 0 has {first}, and all ranks must have the same");
            Some(Error::invalid(format!("{name} of rank {rank}"), other, allowed))
        });
        if let Some(error) = differ {
            return Err(Fault::Refused(error));
        }
        let all = tokens.iter().fold(0_usize, |sum, &n| sum.saturating_add(n));
        if all > Routing::MAX_TOKENS {
            let allowed = format!("at most {} are allowed", Routing::MAX_TOKENS);
            return Err(Fault::Refused(Error::invalid("tokens of all ranks", all, allowed)));
        }
        Ok((tokens, others_say))
    }

    /// Gives each rank's text, without tabs and newlines, to all; or, where ranks have an error instead, refuses the call on
    /// all, for the reason of the first of them: what callers do about it is the same on every rank.
    pub fn exchange(&mut self, what: &str, own: Result<&str, &Error>) -> Result<Vec<String>, Fault> {
        let notes = self.announce(what, own.map(|_| 0), own.unwrap_or_default(), &vec![])?;
        match (Self::agreed(&notes), own) {
            // In its own words.
            (Err(_), Err(error)) if notes[..self.rank].iter().all(|note| !note.starts_with(REFUSED)) => {
                Err(Fault::Refused(error.clone()))
            }
            (agreed, _) => Ok(agreed?.1),
        }
    }

    /// This rank's call cannot be made, for a reason that its caller has found: takes the place of the call, so that every
    /// rank returns an error that gives the reason, and none waits for this one.
    pub fn refuse(&mut self, why: Error) -> Error {
        if let Err(error) = self.usable() {
            return error;
        }
        let refused = self.agree("a call", Err(&why), "", &vec![]).err();
        match self.settle::<()>(Err(refused.unwrap_or(Fault::Refused(why)))) {
            Err(error) => error,
            Ok(()) => unreachable!("a refused call has an error"),
        }
    }

    /// One of the three meetings of a call, after it was announced: `step` is 1 to 3.
    pub fn meet(&self, step: u64, what: &str) -> Result<(), Fault> {
        Ok(self.link.meet(4 * self.calls + step, what)?)
    }

    /// A pass begins, of a name such as `a forward`: no rank has finished it.
    pub fn begin(&mut self, name: &'static str) {
        self.link.begin(self.calls, name);
    }

    /// The pass is finished here: it does not matter to it any more whether this rank lives.
    pub fn pass_done(&self) {
        self.link.pass_done();
    }

    /// Why the pass cannot go on: what failed elsewhere, or a rank that has not finished it and died.
    pub fn sound(&self) -> Result<(), Fault> {
        Ok(self.link.pass_sound()?)
    }

    /// Why the ranks will not come to what is ahead: what failed elsewhere, or a rank that died.
    pub fn all_live(&self, what: &str) -> Result<(), Fault> {
        Ok(self.link.all_live(what)?)
    }

    /// This rank makes no more calls: says so, and waits until all others have said the same or died, but no longer than
    /// `limit`. For what may be given back only when nobody uses it any more.
    pub fn leave(&self, limit: Duration) {
        self.link.leave(limit);
    }

    /// Breaks the group, and gives the first reason that any rank had.
    pub fn fail(&self, why: &str) -> Fault {
        self.link.fail(why).into()
    }

    /// The same where this rank waited for too long in the pass.
    pub fn stalled(&self, stall: &Stall) -> Fault {
        self.link.stalled(stall).into()
    }
}

/// What all ranks must have the same.
pub fn facts(machine: &str, pass: String, precision: Precision, shape: &Shape, knobs: &Knobs) -> Facts {
    let shared = |part: fn(&kodkod_core::Shared) -> String| shape.shared.as_ref().map_or("none".into(), part);
    vec![
        ("machine", machine.into()),
        ("pass", pass),
        ("precision", precision.to_string()),
        ("hidden", shape.hidden.to_string()),
        ("intermediate", shape.intermediate.to_string()),
        ("experts", shape.experts.to_string()),
        ("top_k", shape.top_k.to_string()),
        ("shared intermediate", shared(|s| s.intermediate.to_string())),
        ("output gate", shared(|s| s.output_gate.to_string())),
        ("activation", format!("{:?}", shape.activation)),
        ("biases", shape.biases.to_string()),
        ("fwd_comm_sms", knobs.fwd_comm_sms.to_string()),
        ("bwd_comm_sms", knobs.bwd_comm_sms.to_string()),
        ("minibatch_rows", knobs.minibatch_rows.to_string()),
        ("ring_rows", knobs.ring_rows.to_string()),
        ("saved_rows", knobs.saved_rows.to_string()),
    ]
}
