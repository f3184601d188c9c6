//! Compiles the kernels with the shape as constants, and keeps the machine code on disk by a hash of all that went in.
//!
//! The cache is `$KODKOD_CACHE`, else `$XDG_CACHE_HOME/kodkod`, else `~/.cache/kodkod`. A file appears there under its
//! name only when it is whole, so several processes may fill it at once.

use std::ffi::{CStr, CString, c_char, c_int};
use std::hash::Hasher;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, ptr};

use libloading::Library;

use crate::error::{Error, Result};

/// The kernels' files: name, text.
const HEADERS: [(&str, &str); 7] = [
    ("ptx/base.cuh", include_str!("../kernels/ptx/base.cuh")),
    ("ptx/copy.cuh", include_str!("../kernels/ptx/copy.cuh")),
    ("ptx/mma.cuh", include_str!("../kernels/ptx/mma.cuh")),
    ("gemm/tile.cuh", include_str!("../kernels/gemm/tile.cuh")),
    ("program.cuh", include_str!("../kernels/program.cuh")),
    ("params.cuh", include_str!("../kernels/params.cuh")),
    ("pass.cuh", include_str!("../kernels/pass.cuh")),
];

/// One file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// `schedule_count`, `schedule_place`
    Schedule,
    /// `moe_forward`
    Forward,
    /// `moe_backward`
    Backward,
    /// `meet`, `gather`: for ranks with a GPU each
    Meet,
    /// `links_bulk`, `links_lines`, `links_fill`, `links_check`, `links_ping`; takes no constants
    Links,
}

impl Source {
    /// Those of every layer.
    pub const ALL: [Source; 3] = [Source::Schedule, Source::Forward, Source::Backward];

    /// Whether the file depends on a constant: the knobs are the schedule's alone, so that other knobs compile no pass
    /// again. The type of gradients is the backward's.
    fn takes(self, constant: &str) -> bool {
        match constant {
            "PER_MINIBATCH" | "RING" | "SAVED" => self == Source::Schedule,
            "BF16_GRADIENTS" => self == Source::Backward,
            "RANKS" | "TOP_K" => self != Source::Links,
            _ => !matches!(self, Source::Meet | Source::Links),
        }
    }

    fn file(self) -> (&'static str, &'static str) {
        match self {
            Source::Schedule => ("schedule.cu", include_str!("../kernels/schedule.cu")),
            Source::Forward => ("forward.cu", include_str!("../kernels/forward.cu")),
            Source::Backward => ("backward.cu", include_str!("../kernels/backward.cu")),
            Source::Meet => ("meet.cu", include_str!("../kernels/meet.cu")),
            Source::Links => ("links.cu", include_str!("../kernels/links.cu")),
        }
    }
}

const OPTIONS: [&str; 4] = ["--gpu-architecture=sm_90a", "--std=c++17", "-lineinfo", "--ptxas-options=-v"];

/// Machine code, and what the compiler said (registers, spills); empty from the cache.
#[derive(Debug)]
pub struct Cubin {
    /// For `cuModuleLoadData`.
    pub code: Vec<u8>,
    /// The compiler's log.
    pub log: String,
}

/// The machine code of a file with `defines`, from the cache or the compiler.
///
/// # Errors
/// [`Error::NoNvrtc`] where it is not cached and there is no compiler, [`Error::Compile`] with its words.
pub fn cubin(source: Source, defines: &[(&str, String)]) -> Result<Cubin> {
    let path = cache_dir().join(file_name(source, defines));
    if let Ok(code) = fs::read(&path) {
        return Ok(Cubin { code, log: String::new() });
    }
    let cubin = compile(source, defines)?;
    store(&path, &cubin.code)?;
    Ok(cubin)
}

/// Where machine code is kept.
pub fn cache_dir() -> PathBuf {
    let set = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("KODKOD_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|d| d.join("kodkod")))
        .or_else(|| set("HOME").map(|d| d.join(".cache/kodkod")))
        .unwrap_or_else(|| env::temp_dir().join("kodkod"))
}

/// The name of a file's machine code in the cache.
pub fn file_name(source: Source, defines: &[(&str, String)]) -> String {
    format!("{:016x}.cubin", key(source, defines))
}

fn key(source: Source, defines: &[(&str, String)]) -> u64 {
    // A fixed function of the text: FNV-1a, 64 bits.
    struct Fnv(u64);
    impl Hasher for Fnv {
        fn finish(&self) -> u64 {
            self.0
        }
        fn write(&mut self, bytes: &[u8]) {
            for byte in bytes {
                self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
    }
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    hash.write(source.file().1.as_bytes());
    HEADERS.iter().for_each(|(_, text)| hash.write(text.as_bytes()));
    OPTIONS.iter().for_each(|option| hash.write(option.as_bytes()));
    let defines = defines.iter().filter(|(name, _)| source.takes(name));
    defines.for_each(|(name, value)| hash.write(format!("{name}={value};").as_bytes()));
    hash.finish()
}

fn store(path: &Path, code: &[u8]) -> Result<()> {
    let dir = path.parent().expect("a file in the cache has a folder");
    fs::create_dir_all(dir)?;
    let part =
        dir.join(format!(".{}.{}", std::process::id(), path.file_name().unwrap_or_default().display()));
    fs::File::create(&part)?.write_all(code)?;
    fs::rename(&part, path)?;
    Ok(())
}

/// The functions of NVRTC that are needed. A library of its own, not cudarc's: that one only looks on the loader's path.
struct Nvrtc {
    place: PathBuf,
    library: Library,
    /// NVRTC opens it by name, which succeeds where it is loaded already.
    _builtins: Option<Library>,
}

/// The compiler's library, as it would be opened.
///
/// # Errors
/// [`Error::NoNvrtc`], with where it was looked for.
pub fn nvrtc() -> Result<PathBuf> {
    Ok(find_nvrtc()?.place)
}

fn find_nvrtc() -> Result<Nvrtc> {
    let mut places: Vec<PathBuf> = Vec::new();
    if let Some(path) = env::var_os("KODKOD_NVRTC") {
        places.push(path.into());
    }
    let mut folders: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"]
        .iter()
        .filter_map(env::var_os)
        .flat_map(|home| [PathBuf::from(&home).join("lib64"), PathBuf::from(home).join("lib")])
        .collect();
    folders.push("/usr/local/cuda/lib64".into());
    // Wheels of the Python that is active, or first on the path.
    let path = env::var_os("PATH").unwrap_or_default();
    let prefixes = env::var_os("VIRTUAL_ENV")
        .map(PathBuf::from)
        .into_iter()
        .chain(env::split_paths(&path).filter_map(|bin| bin.parent().map(Path::to_path_buf)));
    for prefix in prefixes {
        for python in fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten() {
            let nvidia = python.path().join("site-packages/nvidia");
            for package in fs::read_dir(nvidia).into_iter().flatten().flatten() {
                folders.push(package.path().join("lib"));
            }
        }
    }
    for folder in &folders {
        let mut found: Vec<_> =
            fs::read_dir(folder).into_iter().flatten().flatten().map(|f| f.path()).collect();
        found.sort();
        places.extend(found.into_iter().rev().filter(|f| {
            let name = f.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libnvrtc.so")
        }));
    }
    places.extend(["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"].map(PathBuf::from));
    for place in &places {
        let builtins = place.parent().and_then(|folder| {
            let files = fs::read_dir(folder).ok()?.flatten();
            let path = files.map(|f| f.path()).find(|f| {
                let name = f.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("libnvrtc-builtins.so")
            })?;
            // SAFETY: NVIDIA's library, which runs nothing of note when loaded.
            unsafe { Library::new(path) }.ok()
        });
        // SAFETY: as above.
        if let Ok(library) = unsafe { Library::new(place) } {
            return Ok(Nvrtc { place: place.clone(), library, _builtins: builtins });
        }
    }
    let tried = folders.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ");
    Err(Error::NoNvrtc { tried: format!("{tried} and the loader's path") })
}

type Program = *mut std::ffi::c_void;
type Text = *const c_char;

/// Compiles without looking at the cache. No GPU is needed.
pub fn compile(source: Source, defines: &[(&str, String)]) -> Result<Cubin> {
    let nvrtc = find_nvrtc()?;
    let text = |s: &str| CString::new(s).expect("kernels and options have no NUL");
    let (name, code) = source.file();
    let (name, code) = (text(name), text(code));
    let headers: Vec<_> = HEADERS.iter().map(|(n, t)| (text(n), text(t))).collect();
    let header_names: Vec<_> = headers.iter().map(|h| h.0.as_ptr()).collect();
    let header_texts: Vec<_> = headers.iter().map(|h| h.1.as_ptr()).collect();
    let options: Vec<_> = OPTIONS
        .iter()
        .map(|o| text(o))
        .chain(defines.iter().filter(|(n, _)| source.takes(n)).map(|(n, v)| text(&format!("-D{n}={v}"))))
        .collect();
    let option_texts: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();

    // SAFETY: the signatures are those of nvrtc.h, and every pointer lives through its call.
    unsafe {
        macro_rules! function {
            ($name:literal, $type:ty) => {
                *nvrtc.library.get::<$type>($name).map_err(|e| Error::Compile(e.to_string()))?
            };
        }
        let create = function!(
            b"nvrtcCreateProgram",
            unsafe extern "C" fn(*mut Program, Text, Text, c_int, *const Text, *const Text) -> c_int
        );
        let run =
            function!(b"nvrtcCompileProgram", unsafe extern "C" fn(Program, c_int, *const Text) -> c_int);
        let log_size =
            function!(b"nvrtcGetProgramLogSize", unsafe extern "C" fn(Program, *mut usize) -> c_int);
        let log = function!(b"nvrtcGetProgramLog", unsafe extern "C" fn(Program, *mut c_char) -> c_int);
        let size = function!(b"nvrtcGetCUBINSize", unsafe extern "C" fn(Program, *mut usize) -> c_int);
        let get = function!(b"nvrtcGetCUBIN", unsafe extern "C" fn(Program, *mut c_char) -> c_int);
        let destroy = function!(b"nvrtcDestroyProgram", unsafe extern "C" fn(*mut Program) -> c_int);

        let mut program = ptr::null_mut();
        let status = create(
            &mut program,
            code.as_ptr(),
            name.as_ptr(),
            headers.len() as c_int,
            header_texts.as_ptr(),
            header_names.as_ptr(),
        );
        if status != 0 {
            return Err(Error::Compile(format!("nvrtcCreateProgram returned {status}")));
        }
        let status = run(program, option_texts.len() as c_int, option_texts.as_ptr());
        let mut n = 0;
        log_size(program, &mut n);
        let mut words = vec![0_u8; n.max(1)];
        log(program, words.as_mut_ptr().cast());
        let words = CStr::from_bytes_until_nul(&words).unwrap_or_default().to_string_lossy().into_owned();
        let mut code = Vec::new();
        if status == 0 && size(program, &mut n) == 0 {
            code = vec![0; n];
            get(program, code.as_mut_ptr().cast());
        }
        destroy(&mut program);
        if code.is_empty() { Err(Error::Compile(words)) } else { Ok(Cubin { code, log: words }) }
    }
}
