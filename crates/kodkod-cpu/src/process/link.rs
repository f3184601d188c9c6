//! The file that the processes of a group share, and how they meet there, agree and fail together.
//!
//! ```text
//! Header             who failed, and why
//! Words, one a rank  process, bell, progress, what its call is
//! data               x, dy, slots, counters, ids: `plan.rs` says where
//! ```
//!
//! A rank that has done something another may wait for rings that one's bell: a word to sleep on. Every wait is bounded,
//! and looks at times whether the others still live: a rank holds a lock on a byte of the file that ends with its
//! process. The first failure is written down where all see it, and is what every rank returns.

use std::cell::UnsafeCell;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kodkod_core::{Error, Stall};
use memmap2::{MmapOptions, MmapRaw};

use super::os;
use crate::protocol::Engine;

/// The group cannot be used again: why.
pub(super) struct Broken(pub(super) Error);

/// Text that one rank writes and others read, by the order of another word.
#[repr(C)]
struct Note {
    len: AtomicU32,
    text: UnsafeCell<[u8; Note::ROOM]>,
}

impl Note {
    const ROOM: usize = 2044;

    /// Where another word tells the readers, later and with release.
    fn write(&self, text: &str) {
        let mut len = text.len().min(Self::ROOM);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        // SAFETY: one rank writes a note, and nobody reads it until that rank has said that it is there.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.text.get().cast(), len) };
        self.len.store(len as u32, Ordering::Relaxed);
    }

    /// After that word was seen with acquire.
    fn read(&self) -> String {
        let len = (self.len.load(Ordering::Relaxed) as usize).min(Self::ROOM);
        // SAFETY: written before, and not again while it may be read.
        let bytes = unsafe { std::slice::from_raw_parts(self.text.get().cast::<u8>(), len) };
        String::from_utf8_lossy(bytes).into_owned()
    }
}

#[repr(C, align(4096))]
struct Header {
    magic: AtomicU64,
    ranks: AtomicU32,
    /// [`SOUND`] at first; changed once, with a [`WRITING`] between.
    state: AtomicU32,
    failure: Note,
    version: Note,
}

const SOUND: u32 = 0;
const WRITING: u32 = 1;
/// `failure` says why.
const FAILED: u32 = 2;
/// A task waited too long: each rank that had not finished says what it was at.
const STALLED: u32 = 3;

#[repr(C, align(4096))]
struct Words {
    pid: AtomicU32,
    bell: AtomicU32,
    left: AtomicU32,
    /// How far the rank has come: see [`Link::meet`].
    phase: AtomicU64,
    /// Tasks that it has finished in the pass.
    beat: AtomicU64,
    /// The last pass that it has finished; that it has given up.
    passed: AtomicU64,
    gave_up: AtomicU64,
    /// What its call is, those with even and with odd numbers: one is written while the other may still be read.
    notes: [Note; 2],
    stall: Note,
}

const MAGIC: u64 = 0x6b6f_646b_6f64_2d31; // kodkod-1
/// How often a waiting rank looks whether the others live.
const TICK: Duration = Duration::from_millis(20);

/// The words that all share.
struct Control(MmapRaw);

pub(crate) struct Link {
    file: File,
    path: PathBuf,
    control: Control,
    data: Option<MmapRaw>,
    rank: usize,
    ranks: usize,
    limit: Duration,
    pid: u32,
    /// The pass that this rank is in or was in last.
    pass: u64,
    pass_name: &'static str,
}

fn control_len(ranks: usize) -> usize {
    size_of::<Header>() + ranks * size_of::<Words>()
}

/// The file of a name: in the memory file system where there is one. A name with a slash is a path.
fn path_of(name: &str) -> Result<PathBuf, Error> {
    if name.is_empty() || name.len() > 200 || name.contains('\0') {
        return Err(Error::invalid("name", format!("{name:?}"), "1 to 200 bytes without NUL are needed"));
    }
    if name.contains('/') {
        return Ok(PathBuf::from(name));
    }
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    Ok(folder.join(format!("kodkod-{name}")))
}

impl Control {
    fn map(file: &File, ranks: usize) -> std::io::Result<Control> {
        Ok(Control(MmapOptions::new().len(control_len(ranks)).map_raw(file)?))
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a header, is aligned to pages, and all zeros are one.
        unsafe { &*self.0.as_ptr().cast() }
    }

    /// Of a rank that the mapping is long enough for.
    fn words(&self, rank: usize) -> &Words {
        assert!(control_len(rank + 1) <= self.0.len(), "a rank of the group");
        // SAFETY: within the mapping, aligned, and all zeros are such words.
        unsafe { &*self.0.as_ptr().add(control_len(rank)).cast() }
    }

    fn ring(&self, rank: usize) {
        let bell = &self.words(rank).bell;
        bell.fetch_add(1, Ordering::Release);
        os::wake(bell);
    }

    /// Writes down a failure, unless there is one.
    fn fail(&self, state: u32, text: &str, ranks: usize) {
        let header = self.header();
        if header.state.compare_exchange(SOUND, WRITING, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            header.failure.write(text);
            header.state.store(state, Ordering::Release);
            (0..ranks).for_each(|rank| self.ring(rank));
        }
    }

    /// The state, once it is settled; [`WRITING`] only where who writes was killed at it.
    fn state(&self) -> u32 {
        let state = || self.header().state.load(Ordering::Acquire);
        let start = Instant::now();
        while state() == WRITING && start.elapsed() < 5 * TICK {
            std::thread::yield_now();
        }
        state()
    }
}

impl Link {
    /// Meets the other ranks: rank 0 makes the file, the others open it, and it is unlinked when all have.
    pub(super) fn join(rank: usize, ranks: usize, name: &str, limit: Duration) -> Result<Link, Error> {
        let path = path_of(name)?;
        let (file, control) = match rank {
            0 => create(&path, ranks).map_err(|e| Error::Machine(format!("{}: {e}", path.display())))?,
            _ => open(&path, rank, ranks, limit)?,
        };
        let pid = std::process::id();
        let link = Link { file, path, control, data: None, rank, ranks, limit, pid, pass: 0, pass_name: "" };
        let joined = link.take_place().and_then(|()| link.meet(1, "the meeting of the group"));
        // After a failure the name may already stand for another group's file.
        if (rank == 0 || joined.is_err()) && os::is_at(&link.file, &link.path) {
            // Where it cannot be unlinked it stays; nothing else depends on it.
            let _ = std::fs::remove_file(&link.path);
        }
        // The name is free when this returns: who joins a group of the same name next does not find this file.
        let joined = joined.and_then(|()| link.meet(2, "the meeting of the group"));
        joined.map(|()| link).map_err(|Broken(error)| error)
    }

    /// Says who this rank is, and sees that no other process is it.
    fn take_place(&self) -> Result<(), Broken> {
        let words = self.control.words(self.rank);
        match os::lock(&self.file, self.rank as u64) {
            Ok(true) => {}
            Ok(false) => {
                let other = words.pid.load(Ordering::Relaxed);
                return Err(self.fail(&format!(
                    "rank {} is given to two processes: {other} and {}",
                    self.rank, self.pid
                )));
            }
            Err(e) => return Err(self.fail(&format!("rank {} cannot lock the file: {e}", self.rank))),
        }
        words.pid.store(self.pid, Ordering::Relaxed);
        Ok(())
    }

    /// Says that this rank has come to a phase, and waits until all have.
    pub(super) fn meet(&self, phase: u64, what: &str) -> Result<(), Broken> {
        let me = self.control.words(self.rank);
        me.phase.store(phase, Ordering::Release);
        self.others().for_each(|rank| self.control.ring(rank));
        let start = Instant::now();
        let (mut looked, tick) = (start, self.tick());
        loop {
            let bell = me.bell.load(Ordering::Acquire);
            self.sound()?;
            let missing: Vec<_> = self
                .others()
                .filter(|&rank| self.control.words(rank).phase.load(Ordering::Acquire) < phase)
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            if looked.elapsed() >= tick {
                looked = Instant::now();
                if let Some(why) = missing.iter().find_map(|&rank| self.gone(rank)) {
                    return Err(self.fail(&format!("{why} before {what}")));
                }
                if start.elapsed() >= self.limit {
                    let names = missing.iter().map(|&rank| self.name(rank)).collect::<Vec<_>>().join(", ");
                    let limit = self.limit.as_millis();
                    return Err(self.fail(&format!("{names} did not come to {what} within {limit} ms")));
                }
            }
            os::wait(&me.bell, bell, tick);
        }
    }

    /// Says what this rank's call is, and hears what the others' are, in the order of ranks. Calls count from 1.
    pub(super) fn announce(&self, call: u64, what: &str, note: &str) -> Result<Vec<String>, Broken> {
        // All have announced the call before this one, so they have read what stood here: that of the one before it.
        let place = (call % 2) as usize;
        self.control.words(self.rank).notes[place].write(note);
        self.meet(4 * call, what)?;
        Ok((0..self.ranks).map(|rank| self.control.words(rank).notes[place].read()).collect())
    }

    /// Data of `len` bytes in the file, the same on every rank; what was there may be gone.
    pub(super) fn reserve(&mut self, len: usize) -> Result<(), Broken> {
        if self.data_len() >= len {
            return Ok(());
        }
        self.data = None;
        let start = control_len(self.ranks);
        let map = || {
            os::reserve(&self.file, (start + len) as u64)?;
            MmapOptions::new().offset(start as u64).len(len).map_raw(&self.file)
        };
        match map() {
            Ok(data) => self.data = Some(data),
            Err(e) => {
                let folder = self.path.parent().unwrap_or(&self.path).display();
                return Err(self.fail(&format!(
                    "rank {}: {len} bytes of shared memory are needed in {folder}: {e} (a container may limit it; a path \
                     as the group's name puts the file elsewhere)",
                    self.rank
                )));
            }
        }
        Ok(())
    }

    pub(super) fn data_len(&self) -> usize {
        self.data.as_ref().map_or(0, MmapRaw::len)
    }

    /// The first byte of the data, aligned to 4096.
    pub(super) fn data(&self) -> *mut u8 {
        self.data.as_ref().map_or(std::ptr::null_mut(), MmapRaw::as_mut_ptr)
    }

    /// A pass begins, of a name such as `a forward`: nothing is finished.
    pub(super) fn begin(&mut self, pass: u64, name: &'static str) {
        (self.pass, self.pass_name) = (pass, name);
        self.control.words(self.rank).beat.store(0, Ordering::Relaxed);
    }

    /// The pass is finished here.
    pub(super) fn pass_done(&self) {
        self.control.words(self.rank).passed.store(self.pass, Ordering::Release);
    }

    /// One of another rank's counters has changed.
    pub(crate) fn ring(&self, rank: usize) {
        self.control.ring(rank);
    }

    /// Whoever listens in this process is to look.
    pub(crate) fn ring_here(&self) {
        self.control.ring(self.rank);
    }

    /// Listens while `working` workers run a pass, until the last has rung its own rank: tells the engine what other ranks
    /// did, and them how far it is, and gives the pass up where another fails.
    pub(crate) fn attend(&self, engine: &Engine, working: &AtomicUsize) {
        let me = self.control.words(self.rank);
        let (start, mut looked, tick) = (Instant::now(), Instant::now(), self.tick());
        let (mut heard, mut beats) = (None, None);
        loop {
            let bell = me.bell.load(Ordering::Acquire);
            if working.load(Ordering::Acquire) == 0 {
                return;
            }
            match self.control.state() {
                SOUND => {}
                STALLED => return engine.give_up(engine.stalls(start.elapsed())),
                _ => return engine.give_up(vec![]),
            }
            me.beat.store(engine.finished(), Ordering::Relaxed);
            // That others get on, however slowly, is news too: a rank may wait long for a busy one.
            let now =
                self.others().map(|rank| self.control.words(rank).beat.load(Ordering::Relaxed)).sum::<u64>();
            if heard.replace(bell) != Some(bell) || beats.replace(now) != Some(now) {
                engine.heard();
            }
            if looked.elapsed() >= tick {
                looked = Instant::now();
                if self.pass_sound().is_err() {
                    continue;
                }
            }
            os::wait(&me.bell, bell, tick);
        }
    }

    /// An error where the group has failed, or a rank that has not finished the pass is gone.
    pub(super) fn pass_sound(&self) -> Result<(), Broken> {
        self.sound()?;
        match self.unfinished().find_map(|rank| self.gone(rank)) {
            Some(why) => Err(self.fail(&format!("{why} in the middle of {}", self.pass_name))),
            None => Ok(()),
        }
    }

    /// An error where the group has failed, or a rank is gone.
    pub(super) fn all_live(&self, what: &str) -> Result<(), Broken> {
        self.sound()?;
        match self.others().find_map(|rank| self.gone(rank)) {
            Some(why) => Err(self.fail(&format!("{why} before {what}"))),
            None => Ok(()),
        }
    }

    /// Writes down why the group cannot go on, and gives the first reason that was.
    pub(super) fn fail(&self, text: &str) -> Broken {
        self.control.fail(FAILED, text, self.ranks);
        self.sound().err().unwrap_or(Broken(Error::Machine(text.into())))
    }

    /// The pass was given up here while it waited.
    pub(super) fn stalled(&self, stall: &Stall) -> Broken {
        let Stall { task, counter, seen, expected, waited_ms, .. } = stall;
        let me = self.control.words(self.rank);
        me.stall.write(&format!("{task}\t{counter}\t{seen}\t{expected}\t{waited_ms}"));
        me.gave_up.store(self.pass, Ordering::Release);
        self.control.fail(STALLED, "", self.ranks);
        self.sound().err().unwrap_or_else(|| Broken(Error::Stalled(vec![stall.clone()])))
    }

    /// An error where the group has failed.
    pub(super) fn sound(&self) -> Result<(), Broken> {
        Err(Broken(match self.control.state() {
            SOUND => return Ok(()),
            FAILED => Error::Machine(self.control.header().failure.read()),
            STALLED => Error::Stalled(self.stalls()),
            _ => Error::Machine("a rank was killed while it said what failed".into()),
        }))
    }

    /// What each rank that has not finished the pass, or gave it up, was at, in its own words where it still speaks.
    fn stalls(&self) -> Vec<Stall> {
        let end = Instant::now() + (self.limit / 2).clamp(TICK, 25 * TICK);
        let said = |rank: usize| {
            let words = self.control.words(rank);
            while words.gave_up.load(Ordering::Acquire) != self.pass {
                if Instant::now() >= end || words.passed.load(Ordering::Acquire) >= self.pass {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let text = words.stall.read();
            let mut parts = text.split('\t');
            let mut part = || parts.next().unwrap_or_default();
            let (task, counter) = (part().to_owned(), part().to_owned());
            let mut number = || part().parse::<u64>().unwrap_or(0);
            let (seen, expected, waited_ms) = (number() as u32, number() as u32, number());
            Some(Stall { rank, task, counter, seen, expected, waited_ms })
        };
        let silent = |rank: usize| {
            let words = self.control.words(rank);
            let beat = words.beat.load(Ordering::Relaxed) as u32;
            Stall {
                rank,
                task: format!(
                    "a task that it does not name: process {} gives no answer",
                    words.pid.load(Ordering::Relaxed)
                ),
                counter: "finished tasks".into(),
                seen: beat,
                expected: beat + 1,
                waited_ms: self.limit.as_millis() as u64,
            }
        };
        // A rank may give up what it had finished: a CUDA graph runs its pass again.
        let gave_up = |rank: usize| {
            self.pass > 0 && self.control.words(rank).gave_up.load(Ordering::Acquire) == self.pass
        };
        let concerned: Vec<_> = (0..self.ranks).filter(|&rank| !self.passed(rank) || gave_up(rank)).collect();
        let said: Vec<_> = concerned.into_iter().map(|rank| (rank, said(rank))).collect();
        said.into_iter()
            .filter(|(rank, stall)| stall.is_some() || !self.passed(*rank))
            .map(|(rank, stall)| stall.unwrap_or_else(|| silent(rank)))
            .collect()
    }

    /// Why a rank will not come any more, if so.
    fn gone(&self, rank: usize) -> Option<String> {
        let words = self.control.words(rank);
        // One that has not come yet has no process.
        if words.phase.load(Ordering::Acquire) == 0 {
            return None;
        }
        if words.left.load(Ordering::Acquire) != 0 {
            return Some(format!("{} has left the group", self.name(rank)));
        }
        // A lock that cannot be looked at tells nothing: the limit remains.
        let alive = os::locked_elsewhere(&self.file, rank as u64).unwrap_or(true);
        (!alive).then(|| format!("{} has died", self.name(rank)))
    }

    fn name(&self, rank: usize) -> String {
        match self.control.words(rank).pid.load(Ordering::Relaxed) {
            0 => format!("rank {rank}"),
            pid => format!("rank {rank} (process {pid})"),
        }
    }

    fn passed(&self, rank: usize) -> bool {
        self.control.words(rank).passed.load(Ordering::Acquire) >= self.pass
    }

    fn unfinished(&self) -> impl Iterator<Item = usize> {
        self.others().filter(|&rank| !self.passed(rank))
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(|&rank| rank != self.rank)
    }

    fn tick(&self) -> Duration {
        TICK.min(self.limit / 8)
    }

    /// Says that this rank has left, and waits until all others have, or died, but no longer than `limit`. No failure.
    pub(super) fn leave(&self, limit: Duration) {
        if !self.is_own_process() {
            return;
        }
        let me = self.control.words(self.rank);
        self.say_left();
        let end = Instant::now() + limit;
        loop {
            let bell = me.bell.load(Ordering::Acquire);
            if Instant::now() >= end || self.others().all(|rank| self.gone(rank).is_some()) {
                return;
            }
            os::wait(&me.bell, bell, self.tick());
        }
    }

    fn say_left(&self) {
        self.control.words(self.rank).left.store(1, Ordering::Release);
        self.others().for_each(|rank| self.control.ring(rank));
    }

    /// Whether this is the process that joined, and not a fork of it.
    pub(super) fn is_own_process(&self) -> bool {
        std::process::id() == self.pid
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if self.is_own_process() {
            self.say_left();
        }
    }
}

/// Rank 0's part of the meeting.
fn create(path: &Path, ranks: usize) -> std::io::Result<(File, Control)> {
    if let Ok(old) = OpenOptions::new().read(true).write(true).open(path)
        && os::locked_elsewhere(&old, 0)?
    {
        return Err(std::io::Error::new(
            std::io::ErrorKind::AddrInUse,
            "another group that lives has this name",
        ));
    }
    // Made whole under another name, so that nobody opens half a file; what a killed group left gives way to it.
    let mut half = path.as_os_str().to_owned();
    half.push(format!(".{}", std::process::id()));
    let half = PathBuf::from(half);
    let _ = std::fs::remove_file(&half);
    let file = os::create(&half)?;
    let made = || {
        os::reserve(&file, control_len(ranks) as u64)?;
        os::lock(&file, 0)?;
        let control = Control::map(&file, ranks)?;
        let header = control.header();
        header.ranks.store(ranks as u32, Ordering::Relaxed);
        header.version.write(env!("CARGO_PKG_VERSION"));
        header.magic.store(MAGIC, Ordering::Release);
        control.words(0).pid.store(std::process::id(), Ordering::Relaxed);
        std::fs::rename(&half, path)?;
        Ok(control)
    };
    match made() {
        Ok(control) => Ok((file, control)),
        Err(error) => {
            let _ = std::fs::remove_file(&half);
            Err(error)
        }
    }
}

/// The others' part.
fn open(path: &Path, rank: usize, ranks: usize, limit: Duration) -> Result<(File, Control), Error> {
    let start = Instant::now();
    let invalid = |text: &str| std::io::Error::other(text.to_owned());
    let attempt = || {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() < control_len(1) as u64 {
            return Err(invalid("it is no group's file"));
        }
        let control = Control::map(&file, 1)?;
        if control.header().magic.load(Ordering::Acquire) != MAGIC {
            return Err(invalid("it is no group's file"));
        }
        let own = control.words(0).pid.load(Ordering::Relaxed) == std::process::id();
        if !own && !os::locked_elsewhere(&file, 0)? {
            return Err(invalid("a group that has ended left it"));
        }
        Ok((file, control, own))
    };
    loop {
        match attempt() {
            Ok((_, _, true)) => {
                return Err(Error::invalid("rank", rank, "rank 0 is this process; each rank needs its own"));
            }
            Ok((file, control, false)) => {
                let said = |e: std::io::Error| Error::Machine(format!("{}: {e}", path.display()));
                let header = control.header();
                let (theirs, version) =
                    (header.ranks.load(Ordering::Relaxed) as usize, header.version.read());
                if file.metadata().map_err(said)?.len() < control_len(theirs) as u64 {
                    return Err(said(invalid("it is shorter than it says")));
                }
                let control = Control::map(&file, theirs).map_err(said)?;
                let ours = env!("CARGO_PKG_VERSION");
                let differ = match (theirs == ranks, version == ours) {
                    (false, _) => format!("ranks of rank {rank} is {ranks}: rank 0 has {theirs}"),
                    (_, false) => format!("kodkod of rank {rank} is {ours}: rank 0 has {version}"),
                    _ => return Ok((file, control)),
                };
                control.fail(FAILED, &differ, theirs);
                return Err(Error::Machine(differ));
            }
            Err(e) if start.elapsed() >= limit => {
                let limit = limit.as_millis();
                let path = path.display();
                return Err(Error::Machine(format!("rank 0 did not come within {limit} ms: {path}: {e}")));
            }
            // Not there yet.
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}
