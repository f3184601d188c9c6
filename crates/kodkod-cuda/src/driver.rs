//! A thin, safe-where-it-can-be wrapper over the CUDA driver: context, streams, events, buffers, modules, launches and
//! tensor maps. Nothing here knows what an expert is.

use std::ffi::{CStr, CString, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use crate::error::{Error, Result};

/// `Ok` where the driver says so, else its own words and what was tried.
pub(crate) fn check(result: CUresult, what: &str) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = ptr::null();
    // SAFETY: the driver is loaded, and hands out a static string.
    let text = unsafe {
        match sys::cuGetErrorString(result, &mut name) {
            CUresult::CUDA_SUCCESS if !name.is_null() => CStr::from_ptr(name).to_string_lossy().into_owned(),
            _ => format!("{result:?}"),
        }
    };
    Err(Error::Driver { what: what.into(), text })
}

/// CUDA 12.8, whose driver has all functions that are called here and in `caller`: `cuEventElapsedTime_v2` came last.
const LEAST_VERSION: i32 = 12_080;

/// A GPU, on its primary context, current on the thread that calls.
#[derive(Debug)]
pub struct Device {
    ordinal: i32,
    context: sys::CUcontext,
    name: String,
    sms: u32,
    capability: (i32, i32),
}

// SAFETY: a primary context may be used from any thread.
unsafe impl Send for Device {}
// SAFETY: as above; the fields are read only.
unsafe impl Sync for Device {}

impl Device {
    /// The GPU of an ordinal; its context is current then. It stays open to the end of the process, since buffers may outlive
    /// whoever opened it, and since opening takes long.
    ///
    /// # Errors
    /// Without a driver or with an old one, without such a GPU, or with one that is not sm_90, says so and what works instead.
    pub fn new(ordinal: usize) -> Result<Arc<Self>> {
        static OPEN: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.iter().find(|device| device.ordinal() == ordinal) {
            device.make_current()?;
            return Ok(device.clone());
        }
        let device = Arc::new(Self::open(ordinal)?);
        device.make_current()?;
        open.push(device.clone());
        Ok(device)
    }

    fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        let (mut device, mut context, mut count, mut version) = (0, ptr::null_mut(), 0, 0);
        // SAFETY: the driver is there; every pointer is to a local of the right type.
        unsafe {
            check(sys::cuDriverGetVersion(&mut version), "ask for the driver's version")?;
            // A function that the driver lacks would end the process when it is called.
            if version < LEAST_VERSION {
                return Err(Error::OldDriver { major: version / 1000, minor: version % 1000 / 10 });
            }
            check(sys::cuInit(0), "initialise the driver")?;
            check(sys::cuDeviceGetCount(&mut count), "count GPUs")?;
            if ordinal >= count as usize {
                return Err(Error::NoDevice { ordinal, count: count as usize });
            }
            check(sys::cuDeviceGet(&mut device, ordinal as i32), "open the GPU")?;
            let attribute = |which| {
                let mut value = 0;
                check(sys::cuDeviceGetAttribute(&mut value, which, device), "read a GPU attribute")
                    .map(|()| value)
            };
            use sys::CUdevice_attribute_enum as A;
            let capability = (
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            );
            let sms = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
            let mut name = [0 as std::ffi::c_char; 128];
            check(sys::cuDeviceGetName(name.as_mut_ptr(), 128, device), "read the GPU's name")?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            if capability != (9, 0) {
                return Err(Error::Capability { name, major: capability.0, minor: capability.1 });
            }
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device), "open the primary context")?;
            Ok(Device { ordinal: ordinal as i32, context, name, sms, capability })
        }
    }

    /// Makes the context current on this thread.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context is never released.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, "make the context current")
    }

    /// The driver's number of the GPU.
    pub fn ordinal(&self) -> usize {
        self.ordinal as usize
    }

    /// Lets work on this GPU address memory of another one; nothing to do where they are the same.
    ///
    /// # Errors
    /// [`Error::NoPeer`] where no link allows it.
    pub fn enable_peer(&self, other: &Device) -> Result<()> {
        if self.ordinal == other.ordinal {
            return Ok(());
        }
        let mut can = 0;
        // SAFETY: both are GPUs that the driver gave, and their contexts are never released.
        unsafe {
            check(sys::cuDeviceCanAccessPeer(&mut can, self.ordinal, other.ordinal), "ask for peer access")?;
            if can == 0 {
                return Err(Error::NoPeer { from: self.ordinal(), to: other.ordinal() });
            }
            self.make_current()?;
            match sys::cuCtxEnablePeerAccess(other.context, 0) {
                CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
                result => check(result, "enable peer access"),
            }
        }
    }

    /// Streaming multiprocessors.
    pub fn sms(&self) -> u32 {
        self.sms
    }

    /// The GPU's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Names the GPU, or the part of one, beyond this process: 32 hexadecimal digits.
    pub fn uuid(&self) -> Result<String> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the GPU is one that the driver gave.
        check(unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, self.ordinal) }, "ask for the GPU's UUID")?;
        Ok(uuid.bytes.iter().map(|&b| format!("{:02x}", b as u8)).collect())
    }

    /// Waits until all work on the GPU is done.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: a context is current.
        check(unsafe { sys::cuCtxSynchronize() }, "wait for the GPU")
    }
}

/// A stream that does not wait for the default stream.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    borrowed: bool,
}
// SAFETY: the driver locks its streams.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream.
    pub fn new() -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: a context is current.
        check(unsafe { sys::cuStreamCreate(&mut raw, 1) }, "make a stream")?;
        Ok(Stream { raw, borrowed: false })
    }

    /// A stream of the caller's, by its handle; 0 is the default stream. It is not destroyed here.
    ///
    /// # Safety
    /// The handle is a stream's of the context that is current where `self` is used, and outlives `self`.
    pub unsafe fn borrowed(handle: u64) -> Self {
        Stream { raw: handle as sys::CUstream, borrowed: true }
    }

    /// Waits until its work is done.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        check(unsafe { sys::cuStreamSynchronize(self.raw) }, "wait for a stream")
    }

    /// The number of the capture that it records into, or `None` where it runs its work. No two captures of a process have one
    /// number.
    ///
    /// # Errors
    /// The driver's words, also where the capture has failed before.
    pub fn capture(&self) -> Result<Option<u64>> {
        use sys::CUstreamCaptureStatus::{
            CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_STREAM_CAPTURE_STATUS_INVALIDATED,
            CU_STREAM_CAPTURE_STATUS_NONE,
        };
        let (mut status, mut id) = (CU_STREAM_CAPTURE_STATUS_NONE, 0);
        // SAFETY: the stream is alive; what is not asked for is null.
        let result = unsafe {
            sys::cuStreamGetCaptureInfo_v3(
                self.raw,
                &mut status,
                &mut id,
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        check(result, "ask whether a stream is captured")?;
        match status {
            CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(id)),
            CU_STREAM_CAPTURE_STATUS_INVALIDATED => {
                check(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "record into a capture").map(|()| None)
            }
            CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
        }
    }

    /// Records what follows here, and in streams that wait for it, instead of running it.
    pub fn begin_capture(&self) -> Result<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) }, "begin a capture")
    }

    /// What was recorded since [`Stream::begin_capture`].
    pub fn end_capture(&self) -> Result<Graph> {
        let (mut graph, mut raw) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is alive; the graph is not used after its executable copy is made.
        unsafe {
            check(sys::cuStreamEndCapture(self.raw, &mut graph), "end a capture")?;
            let work = graph_work(graph);
            let made = check(sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0), "make a graph");
            check(sys::cuGraphDestroy(graph), "drop a graph")?;
            made?;
            Ok(Graph { raw, work: work? })
        }
    }

    /// Writes a buffer's first word, without a kernel: it comes to pass while kernels keep the GPU busy.
    ///
    /// # Panics
    /// Where the buffer is empty.
    pub fn write_word(&self, buffer: &Buffer<u32>, value: u32) -> Result<()> {
        assert!(!buffer.is_empty(), "a word of the buffer");
        // SAFETY: the stream is alive, and the buffer has that word.
        check(unsafe { sys::cuStreamWriteValue32_v2(self.raw, buffer.address, value, 0) }, "write a word")
    }

    /// Makes what follows here wait for an event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both are alive.
        check(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) }, "wait for an event")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.borrowed {
            // SAFETY: made in `new`.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// Recorded work, to run many times. What it uses must outlive it.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    work: GraphWork,
}

/// How often a graph does what.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct GraphWork {
    /// Kernels.
    pub kernels: usize,
    /// Fills of memory.
    pub fills: usize,
    /// All else that takes time: copies, calls of the host.
    pub others: usize,
}

/// # Safety
/// The graph is alive.
unsafe fn graph_work(graph: sys::CUgraph) -> Result<GraphWork> {
    let mut count = 0;
    // SAFETY: with no room for nodes, only their number is written.
    check(unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut count) }, "count a graph's nodes")?;
    let mut nodes = vec![ptr::null_mut(); count];
    // SAFETY: there is room for `count` nodes.
    check(unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) }, "list a graph's nodes")?;
    let mut work = GraphWork::default();
    for node in nodes {
        use sys::CUgraphNodeType::{
            CU_GRAPH_NODE_TYPE_EMPTY, CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMSET,
        };
        let mut kind = CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: the node is one of the graph's.
        check(unsafe { sys::cuGraphNodeGetType(node, &mut kind) }, "ask for a node's type")?;
        match kind {
            CU_GRAPH_NODE_TYPE_KERNEL => work.kernels += 1,
            CU_GRAPH_NODE_TYPE_MEMSET => work.fills += 1,
            CU_GRAPH_NODE_TYPE_EMPTY => {}
            _ => work.others += 1,
        }
    }
    Ok(work)
}
// SAFETY: the driver locks its graphs.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// What it does.
    pub fn work(&self) -> GraphWork {
        self.work
    }

    /// Runs the work in a stream.
    ///
    /// # Safety
    /// The buffers, kernels and streams that the work uses are alive.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive; the caller's contract.
        check(unsafe { sys::cuGraphLaunch(self.raw, stream.raw) }, "run a graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `end_capture`.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
}
// SAFETY: the driver locks its events.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that can be timed.
    pub fn new() -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: a context is current.
        check(unsafe { sys::cuEventCreate(&mut raw, 0) }, "make an event")?;
        Ok(Event { raw })
    }

    /// Puts the event at the end of a stream.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive.
        check(unsafe { sys::cuEventRecord(self.raw, stream.raw) }, "record an event")
    }

    /// Whether what was recorded last is done; so is an event that was never recorded.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check(result, "look at an event").map(|()| true),
        }
    }

    /// Milliseconds from `self` to `end`, both of them past.
    pub fn milliseconds_to(&self, end: &Event) -> Result<f32> {
        let mut ms = 0.0;
        // SAFETY: both are alive.
        unsafe {
            check(sys::cuEventSynchronize(end.raw), "wait for an event")?;
            check(sys::cuEventElapsedTime_v2(&mut ms, self.raw, end.raw), "time two events")?;
        }
        Ok(ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// Elements of GPU memory, from a plain allocation.
#[derive(Debug)]
pub struct Buffer<T> {
    address: u64,
    len: usize,
    /// The context that it was allocated in; null where it is borrowed.
    context: sys::CUcontext,
    _elements: PhantomData<T>,
}
// SAFETY: the address is a number, and memory of a context may be used from any thread.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above; what the GPU does with the memory is ordered by streams.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Copy> Buffer<T> {
    /// `len` elements, not initialised.
    pub fn new(len: usize) -> Result<Self> {
        let (mut address, mut context) = (0, ptr::null_mut());
        let bytes = (len * size_of::<T>()).max(256);
        // SAFETY: a context is current.
        unsafe {
            check(sys::cuCtxGetCurrent(&mut context), "ask for the current context")?;
            check(sys::cuMemAlloc_v2(&mut address, bytes), &format!("allocate {bytes} bytes"))?;
        }
        Ok(Buffer { address, len, context, _elements: PhantomData })
    }

    /// `len` elements of the caller's at an address, which are not freed here.
    ///
    /// # Safety
    /// So many elements are there for as long as `self`, and work that was given it, are in use.
    pub unsafe fn borrowed(address: u64, len: usize) -> Self {
        Buffer { address, len, context: ptr::null_mut(), _elements: PhantomData }
    }

    /// A copy of `host`.
    pub fn from_host(host: &[T]) -> Result<Self> {
        let buffer = Self::new(host.len())?;
        buffer.write(host)?;
        Ok(buffer)
    }

    /// Overwrites the first elements; returns when they are there.
    ///
    /// # Panics
    /// Where `host` is longer than the buffer.
    pub fn write(&self, host: &[T]) -> Result<()> {
        assert!(host.len() <= self.len, "a copy beyond the buffer");
        let bytes = size_of_val(host);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both sides hold that many bytes.
        check(unsafe { sys::cuMemcpyHtoD_v2(self.address, host.as_ptr().cast(), bytes) }, "copy to the GPU")
    }

    /// The elements; returns when they are here.
    pub fn read(&self) -> Result<Vec<T>>
    where
        T: Default,
    {
        let mut host = vec![T::default(); self.len];
        self.read_into(&mut host)?;
        Ok(host)
    }

    /// The first elements, to `host`; returns when they are here.
    ///
    /// # Panics
    /// Where `host` is longer than the buffer.
    pub fn read_into(&self, host: &mut [T]) -> Result<()> {
        assert!(host.len() <= self.len, "a copy beyond the buffer");
        let bytes = size_of_val(host);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both sides hold that many bytes.
        check(
            unsafe { sys::cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), self.address, bytes) },
            "copy from the GPU",
        )
    }

    /// A handle by which another process maps the memory, and how far from the start of what it maps the buffer begins.
    pub fn export(&self) -> Result<(IpcHandle, u64)> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        let (mut base, mut size) = (0, 0);
        // SAFETY: the buffer is alive, and the driver refuses what cannot be exported.
        unsafe {
            check(sys::cuMemGetAddressRange_v2(&mut base, &mut size, self.address), "look at an allocation")?;
            check(sys::cuIpcGetMemHandle(&mut handle, self.address), "export memory to other processes")?;
        }
        Ok((IpcHandle(handle.reserved.map(|b| b as u8)), self.address - base))
    }

    /// Sets every byte, in a stream.
    pub fn fill(&self, byte: u8, stream: &Stream) -> Result<()> {
        let bytes = self.len * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the buffer holds that many bytes.
        check(unsafe { sys::cuMemsetD8Async(self.address, byte, bytes, stream.raw) }, "fill a buffer")
    }

    /// The GPU's address of the first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if !self.context.is_null() {
            // SAFETY: allocated in `new`, in that context; the driver waits for work that uses it. A failure has nobody to tell.
            within(self.context, || unsafe { sys::cuMemFree_v2(self.address) });
        }
    }
}

/// Copies bytes from one place of GPU memory to another, in a stream.
///
/// # Safety
/// Both places have so many bytes until the copy is done.
pub unsafe fn copy(to: u64, from: u64, bytes: usize, stream: &Stream) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's contract; the stream is alive.
    check(unsafe { sys::cuMemcpyAsync(to, from, bytes, stream.raw) }, "copy on the GPU")
}

/// Names an allocation to other processes of the host: see [`Buffer::export`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; 64]);

/// Another process's allocation, mapped into this one.
#[derive(Debug)]
pub struct Mapped {
    address: u64,
    context: sys::CUcontext,
}
// SAFETY: as for a buffer.
unsafe impl Send for Mapped {}
// SAFETY: as for a buffer.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps it, for work on the current context's GPU.
    ///
    /// # Errors
    /// The driver's words, also where this process made the allocation, or no link between the GPUs allows it.
    pub fn open(handle: &IpcHandle) -> Result<Self> {
        let (mut address, mut context) = (0, ptr::null_mut());
        let raw = sys::CUipcMemHandle { reserved: handle.0.map(|b| b as std::ffi::c_char) };
        let lazily = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: a context is current; the driver checks the handle.
        unsafe {
            check(sys::cuCtxGetCurrent(&mut context), "ask for the current context")?;
            check(sys::cuIpcOpenMemHandle_v2(&mut address, raw, lazily), "map another process's memory")?;
        }
        Ok(Mapped { address, context })
    }

    /// This process's address of its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped in `open`, in that context. A failure has nobody to tell.
        within(self.context, || unsafe { sys::cuIpcCloseMemHandle(self.address) });
    }
}

/// Gives something back in the context that it was made in, which need not be the current one.
fn within(context: sys::CUcontext, give_back: impl FnOnce() -> CUresult) {
    let mut before = ptr::null_mut();
    // SAFETY: a context that something lives in is alive. A failure has nobody to tell.
    unsafe {
        let _ = sys::cuCtxGetCurrent(&mut before);
        let _ = sys::cuCtxSetCurrent(context);
        let _ = give_back();
        let _ = sys::cuCtxSetCurrent(before);
    }
}

/// Loaded machine code.
#[derive(Debug)]
pub struct Module {
    raw: sys::CUmodule,
    context: sys::CUcontext,
}
// SAFETY: a module is read only once it is loaded.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin.
    pub fn load(cubin: &[u8]) -> Result<Self> {
        let (mut raw, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a context is current; the image is whole, and the driver checks it.
        unsafe {
            check(sys::cuCtxGetCurrent(&mut context), "ask for the current context")?;
            check(sys::cuModuleLoadData(&mut raw, cubin.as_ptr().cast()), "load a module")?;
        }
        Ok(Module { raw, context })
    }

    /// A kernel of the module, allowed `shared` bytes of dynamic shared memory.
    pub fn kernel(&self, name: &str, shared: u32) -> Result<Kernel> {
        let mut raw = ptr::null_mut();
        let symbol = CString::new(name).expect("kernel names have no NUL");
        // SAFETY: the module is loaded.
        unsafe {
            check(
                sys::cuModuleGetFunction(&mut raw, self.raw, symbol.as_ptr()),
                &format!("find kernel {name}"),
            )?;
            if shared > 0 {
                use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST;
                check(sys::cuFuncSetAttribute(raw, MOST, shared as i32), "allow shared memory")?;
            }
        }
        Ok(Kernel { raw, shared, name: name.into() })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, in that context.
        within(self.context, || unsafe { sys::cuModuleUnload(self.raw) });
    }
}

/// A kernel; it lives as long as its module.
#[derive(Debug)]
pub struct Kernel {
    raw: sys::CUfunction,
    shared: u32,
    name: String,
}
// SAFETY: a function handle is read only.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Launches `grid` CTAs of `block` threads with one parameter, a struct given as bytes.
    ///
    /// # Safety
    /// `parameter` is laid out as the kernel's parameter, what it points to is valid on the GPU until the kernel has run,
    /// and the kernel's module is still loaded.
    pub unsafe fn launch(&self, grid: u32, block: u32, stream: &Stream, parameter: &Parameter) -> Result<()> {
        let mut pointers = [parameter.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the caller's contract.
        let result = unsafe {
            sys::cuLaunchKernel(
                self.raw,
                grid,
                1,
                1,
                block,
                1,
                1,
                self.shared,
                stream.raw,
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check(result, &format!("launch {}", self.name))
    }
}

/// A struct that a kernel takes, written field by field with C's alignment.
#[derive(Debug, Clone)]
pub struct Parameter {
    words: Vec<Line>,
    len: usize,
}

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Default for Parameter {
    fn default() -> Self {
        Self::new()
    }
}

impl Parameter {
    /// An empty struct.
    pub fn new() -> Self {
        Parameter { words: vec![Line([0; 64]); 128], len: 0 }
    }

    fn put(&mut self, bytes: &[u8], align: usize) -> &mut Self {
        let at = self.len.next_multiple_of(align);
        // SAFETY: lines are plain bytes.
        let all = unsafe {
            std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), self.words.len() * 64)
        };
        all[at..at + bytes.len()].copy_from_slice(bytes);
        self.len = at + bytes.len();
        self
    }

    /// A 32-bit field.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_ne_bytes(), 4)
    }

    /// A 64-bit field, or an address.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_ne_bytes(), 8)
    }

    /// A tensor map.
    pub fn map(&mut self, map: &TensorMap) -> &mut Self {
        self.put(&map.0, 64)
    }

    /// The struct so far, to copy to the GPU.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: lines are plain bytes, and `len` of them are written.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast::<u8>(), self.len.next_multiple_of(8)) }
    }

    fn as_ptr(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }
}

/// How the copy engine sees a row-major bf16 matrix: in boxes, with the 128-byte swizzle.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub struct TensorMap([u8; 128]);

impl TensorMap {
    /// No matrix.
    pub const NONE: TensorMap = TensorMap([0; 128]);

    /// `[rows, columns]` in bf16 at `address`, in boxes of 64 columns and `box_rows` rows.
    pub fn new(address: u64, rows: u64, columns: u64, box_rows: u32) -> Result<Self> {
        if rows == 0 || columns == 0 {
            return Ok(Self::NONE);
        }
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (dims, strides, boxes, steps) = ([columns, rows], [columns * 2], [64, box_rows], [1, 1]);
        // SAFETY: all arrays have the rank's length; the driver checks the rest.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                address as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(result, &format!("map a matrix of {rows} x {columns}"))?;
        let mut bytes = [0; 128];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(map.opaque) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        Ok(TensorMap(bytes))
    }
}
