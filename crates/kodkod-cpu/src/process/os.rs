//! What a group of processes needs from the operating system: locks that end with their process, room in a file,
//! and a word to sleep on.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

#[cfg(unix)]
mod system {
    use std::fs::OpenOptions;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    use super::{File, Path, io};

    /// A new file that only this user may open.
    pub(in super::super) fn create(path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
    }

    /// Locks one byte of a file for this process, until it ends or closes the file; false where another has it. The
    /// children of a fork do not inherit the lock, so it tells about this process alone.
    pub(in super::super) fn lock(file: &File, byte: u64) -> io::Result<bool> {
        match fcntl(file, byte, libc::F_SETLK) {
            Ok(_) => Ok(true),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Whether another process has a byte locked. Every lock of this process is closed with any handle of the file, so
    /// it must be opened once only.
    pub(in super::super) fn locked_elsewhere(file: &File, byte: u64) -> io::Result<bool> {
        Ok(fcntl(file, byte, libc::F_GETLK)?.l_type != libc::F_UNLCK as libc::c_short)
    }

    fn fcntl(file: &File, byte: u64, command: libc::c_int) -> io::Result<libc::flock> {
        // SAFETY: a struct of integers.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        lock.l_start = byte as libc::off_t;
        lock.l_len = 1;
        // SAFETY: the descriptor is open, and the lock lives through the call.
        match unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(lock),
        }
    }

    /// Whether a path still names this very file.
    pub(in super::super) fn is_at(file: &File, path: &Path) -> bool {
        let (Ok(here), Ok(there)) = (file.metadata(), path.metadata()) else { return false };
        (here.dev(), here.ino()) == (there.dev(), there.ino())
    }
}

#[cfg(not(unix))]
mod system {
    use super::{File, Path, io};

    pub(in super::super) fn create(_path: &Path) -> io::Result<File> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "groups of processes need a Unix system"))
    }

    pub(in super::super) fn lock(_file: &File, _byte: u64) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in super::super) fn locked_elsewhere(_file: &File, _byte: u64) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in super::super) fn is_at(_file: &File, _path: &Path) -> bool {
        false
    }
}

pub(super) use system::{create, is_at, lock, locked_elsewhere};

/// Makes a file at least `len` bytes long. On Linux it has the room for them too: without, a full file system would kill
/// the process when it writes.
pub(super) fn reserve(file: &File, len: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    loop {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len as libc::off_t) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EOPNOTSUPP) => break,
            _ => return Err(error),
        }
    }
    if file.metadata()?.len() < len { file.set_len(len) } else { Ok(()) }
}

/// Sleeps until a word that was `seen` is rung by [`wake`], or `limit` has passed. It may return early.
pub(super) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    #[cfg(target_os = "linux")]
    {
        let time = libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(limit.subsec_nanos()),
        };
        // SAFETY: the word lives through the call; the kernel compares it to `seen` and sleeps, and writes nothing.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &time) };
    }
    #[cfg(not(target_os = "linux"))]
    {
        let end = std::time::Instant::now() + limit;
        while word.load(std::sync::atomic::Ordering::Acquire) == seen && std::time::Instant::now() < end {
            std::thread::sleep(Duration::from_micros(100).min(limit));
        }
    }
}

/// Wakes every process that waits for a word, which has changed.
pub(super) fn wake(word: &AtomicU32) {
    #[cfg(target_os = "linux")]
    // SAFETY: the word is only an address to the kernel here.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX)
    };
    #[cfg(not(target_os = "linux"))]
    let _ = word;
}
