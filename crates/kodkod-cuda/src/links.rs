//! Rates of the link between two GPUs: copies as the passes make them, by number of SMs and size of a bulk copy, and a
//! flag's way there and back. Both ends may be the same GPU; then it is a copy within its memory.

use std::sync::Arc;

use crate::driver::{Buffer, Device, Event, Kernel, Module, Parameter, Stream};
use crate::error::{Error, Result};
use crate::jit::{self, Source};

/// Bytes in each end's two buffers, of which one is sent and the other written.
const BYTES: u64 = 256 << 20;
/// Bytes that a launch copies for each of its SMs, up to [`BYTES`]: enough to hide that a launch takes microseconds.
const BYTES_PER_SM: u64 = 16 << 20;
/// As in `links.cu`.
const THREADS: u32 = 384;
const ROOM: u32 = 12 * 4 * 4096;
const FLAG_ROUNDS: usize = 4096;
/// Threads that store lines: as many as the passes' consumers have.
const LINE_THREADS: u32 = 256;
/// Bytes of 16 lines, which a warp stores at once, and of a row that they are stored to.
const LINES: u32 = 2048;
const PITCH: u32 = 4096;
/// How long a kernel waits for a flag.
const LIMIT_NS: u64 = 2_000_000_000;

/// How bytes cross the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Bulk copies from the other GPU's memory to shared memory, and from there to this GPU's.
    Pull,
    /// Bulk copies from shared memory to the other GPU's memory.
    PushBulk,
    /// Stores of 16 bytes a lane, whole lines of 128 bytes, to rows of the other GPU's memory.
    PushLines,
}

impl Transfer {
    /// All of them.
    pub const ALL: [Transfer; 3] = [Transfer::Pull, Transfer::PushBulk, Transfer::PushLines];

    /// Bytes of a bulk copy, or of what a warp stores in lines at once, that [`Links::rate`] takes.
    pub fn pieces(self) -> &'static [u32] {
        match self {
            Transfer::Pull | Transfer::PushBulk => &[512, 1024, 2048, 4096, 8192, 16384],
            Transfer::PushLines => &[LINES],
        }
    }
}

/// A way of a flag there and back, over many of them.
#[derive(Debug, Clone, Copy)]
pub struct RoundTrip {
    /// Median, in nanoseconds.
    pub median_ns: f64,
    /// The least.
    pub least_ns: f64,
    /// How many were timed.
    pub rounds: usize,
}

/// One of the two GPUs. The fields go in this order, the device last.
struct End {
    events: [Event; 2],
    stream: Stream,
    bulk: Kernel,
    lines: Kernel,
    fill: Kernel,
    check: Kernel,
    ping: Kernel,
    _module: Module,
    sent: Buffer<u32>,
    written: Buffer<u32>,
    wrong: Buffer<u32>,
    flag: Buffer<u32>,
    clocks: Buffer<u64>,
    cycles: Buffer<u32>,
    seed: u32,
    device: Arc<Device>,
}

impl Drop for End {
    fn drop(&mut self) {
        // Streams and modules want their context current. A failure has nobody to tell.
        let _ = self.device.make_current();
    }
}

impl End {
    fn new(device: Arc<Device>, code: &[u8], seed: u32) -> Result<Self> {
        device.make_current()?;
        let module = Module::load(code)?;
        let words = (BYTES / 4) as usize;
        let end = End {
            events: [Event::new()?, Event::new()?],
            stream: Stream::new()?,
            bulk: module.kernel("links_bulk", ROOM)?,
            // As much shared memory, so that no two CTAs share an SM.
            lines: module.kernel("links_lines", ROOM)?,
            fill: module.kernel("links_fill", 0)?,
            check: module.kernel("links_check", 0)?,
            ping: module.kernel("links_ping", 0)?,
            _module: module,
            sent: Buffer::new(words)?,
            written: Buffer::new(words)?,
            wrong: Buffer::new(1)?,
            flag: Buffer::new(1)?,
            clocks: Buffer::new(3)?,
            cycles: Buffer::new(FLAG_ROUNDS)?,
            seed,
            device,
        };
        let mut fill = Parameter::new();
        fill.u64(end.sent.address()).u64(words as u64).u32(seed);
        // SAFETY: the struct `Fill` of links.cu; the buffer holds that many words.
        unsafe { end.fill.launch(end.device.sms(), 1024, &end.stream, &fill)? };
        end.stream.synchronize()?;
        Ok(end)
    }

    /// Words of the first `bytes` of `written` that are not those of the end with `seed`.
    fn wrong(&self, bytes: u64, seed: u32, pitch: u32) -> Result<u32> {
        self.device.make_current()?;
        self.wrong.fill(0, &self.stream)?;
        let mut check = Parameter::new();
        check.u64(self.written.address()).u64(self.wrong.address()).u64(bytes / 4).u32(seed).u32(pitch);
        // SAFETY: the struct `Check` of links.cu; the buffers hold that many words, and one.
        unsafe { self.check.launch(self.device.sms(), 1024, &self.stream, &check)? };
        self.stream.synchronize()?;
        Ok(self.wrong.read()?[0])
    }
}

/// Two GPUs, or one in both places, with what the measurements need: 512 MiB on each end.
pub struct Links {
    ends: [End; 2],
    one_gpu: bool,
}

impl Links {
    /// The GPUs of two ordinals, each with access to the other's memory.
    ///
    /// # Errors
    /// Without these GPUs, without access between them, without memory or a compiler.
    pub fn new(ordinals: [usize; 2]) -> Result<Self> {
        let devices = [Device::new(ordinals[0])?, Device::new(ordinals[1])?];
        let one_gpu = ordinals[0] == ordinals[1];
        devices[0].enable_peer(&devices[1])?;
        devices[1].enable_peer(&devices[0])?;
        let code = jit::cubin(Source::Links, &[])?.code;
        let [first, second] = devices;
        Ok(Links { ends: [End::new(first, &code, 1)?, End::new(second, &code, 2)?], one_gpu })
    }

    /// The GPUs' names.
    pub fn names(&self) -> [&str; 2] {
        [self.ends[0].device.name(), self.ends[1].device.name()]
    }

    /// The most SMs that [`Links::rate`] can give to each direction: both directions share them where there is one GPU.
    pub fn sms(&self, both_ways: bool) -> u32 {
        let sms = self.ends[0].device.sms().min(self.ends[1].device.sms());
        if both_ways && self.one_gpu { sms / 2 } else { sms }
    }

    /// GB/s (10^9 bytes) in each direction: the median of `repeat` launches, by events, after one that is not timed. The
    /// first GPU pulls or pushes with `sms` SMs, and with `both_ways` the second does at the same time; then the slower
    /// counts. At the end the bytes are compared with those that were sent.
    ///
    /// # Errors
    /// [`Error::Link`] where `sms` is 0 or more than there are, `piece` is not one of [`Transfer::pieces`], or a byte did
    /// not arrive.
    pub fn rate(
        &self,
        transfer: Transfer,
        both_ways: bool,
        sms: u32,
        piece: u32,
        repeat: usize,
    ) -> Result<f64> {
        if sms == 0 || sms > self.sms(both_ways) || !transfer.pieces().contains(&piece) {
            return Err(Error::Link(format!(
                "{sms} SMs and pieces of {piece} bytes were asked for: 1 to {} SMs and pieces of {:?} are allowed",
                self.sms(both_ways),
                transfer.pieces()
            )));
        }
        let bytes = BYTES.min(u64::from(sms) * BYTES_PER_SM);
        let lines = transfer == Transfer::PushLines;
        let acting = &self.ends[..if both_ways { 2 } else { 1 }];
        let other = |i: usize| &self.ends[1 - i];
        // Where end `i` writes, and what.
        let way = |i: usize| match transfer {
            Transfer::Pull => (&self.ends[i], other(i)),
            Transfer::PushBulk | Transfer::PushLines => (other(i), &self.ends[i]),
        };
        for i in 0..acting.len() {
            let to = way(i).0;
            to.device.make_current()?;
            to.written.fill(0, &to.stream)?;
            to.stream.synchronize()?;
        }
        let mut seconds = Vec::new();
        for launch in 0..=repeat.max(1) {
            for (i, end) in acting.iter().enumerate() {
                let (to, from) = way(i);
                let mut copy = Parameter::new();
                copy.u64(from.sent.address()).u64(to.written.address()).u64(bytes).u32(piece).u32(PITCH);
                let (kernel, threads) = if lines { (&end.lines, LINE_THREADS) } else { (&end.bulk, THREADS) };
                end.device.make_current()?;
                end.events[0].record(&end.stream)?;
                // SAFETY: the struct `Copy` of links.cu; both buffers hold so many bytes and this GPU may reach them.
                unsafe { kernel.launch(sms, threads, &end.stream, &copy)? };
                end.events[1].record(&end.stream)?;
            }
            let mut slowest = 0.0_f64;
            for end in acting {
                end.device.make_current()?;
                slowest = slowest.max(f64::from(end.events[0].milliseconds_to(&end.events[1])?) / 1e3);
            }
            if launch > 0 {
                seconds.push(slowest);
            }
        }
        for i in 0..acting.len() {
            let (to, from) = way(i);
            let wrong = to.wrong(bytes, from.seed, if lines { PITCH } else { 0 })?;
            if wrong > 0 {
                return Err(Error::Link(format!(
                    "{transfer:?} of {bytes} bytes by {sms} SMs in pieces of {piece}: {wrong} words did not arrive"
                )));
            }
        }
        Ok(bytes as f64 / median(&mut seconds) / 1e9)
    }

    /// A counter of the second GPU is added to by the first, whose own counter the second then adds to; each waits for its
    /// own, with release and acquire at system scope, as ranks do.
    ///
    /// # Errors
    /// [`Error::Link`] where an answer does not come within two seconds.
    pub fn round_trip(&self) -> Result<RoundTrip> {
        for end in &self.ends {
            end.device.make_current()?;
            end.flag.fill(0, &end.stream)?;
            end.stream.synchronize()?;
        }
        // Without rounds first: to load a kernel may take that nothing runs, and the second must start beside the first.
        self.ping(0)?;
        self.ping(FLAG_ROUNDS)?;
        let first = &self.ends[0];
        first.device.make_current()?;
        let clocks = first.clocks.read()?;
        let done = clocks[0] as usize;
        if done < FLAG_ROUNDS {
            return Err(Error::Link(format!(
                "a flag's answer did not come within 2 s, after {done} that did"
            )));
        }
        // The first round waits for the other kernel to begin.
        let ns_per_cycle = clocks[1] as f64 / clocks[2].max(1) as f64;
        let mut ns: Vec<_> = first.cycles.read()?[1..].iter().map(|&c| f64::from(c) * ns_per_cycle).collect();
        let median_ns = median(&mut ns);
        Ok(RoundTrip { median_ns, least_ns: ns[0], rounds: ns.len() })
    }

    /// Both GPUs' kernels, with flags that are zero, for `rounds` ways there and back.
    fn ping(&self, rounds: usize) -> Result<()> {
        for (i, end) in self.ends.iter().enumerate() {
            let mut ping = Parameter::new();
            ping.u64(end.flag.address())
                .u64(self.ends[1 - i].flag.address())
                .u64(end.clocks.address())
                .u64(end.cycles.address())
                .u64(LIMIT_NS)
                .u32(rounds as u32)
                .u32(u32::from(i == 0));
            end.device.make_current()?;
            // SAFETY: the struct `Ping` of links.cu; the buffers are as long as it says, and this GPU may reach both flags.
            unsafe { end.ping.launch(1, 1, &end.stream, &ping)? };
        }
        for end in &self.ends {
            end.device.make_current()?;
            end.stream.synchronize()?;
        }
        Ok(())
    }
}

/// Sorts; of an even number the upper of the two in the middle.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
