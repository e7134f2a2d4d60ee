//! A shared object of the dynamic linker: opened, asked for symbols, never closed.
//!
//! UCX leaves threads, exit handlers and patched functions behind, so unloading it can't be made safe.
//! Knows nothing of UCX.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A handle of `dlopen`; the object stays loaded for the life of the process.
pub(crate) struct Object {
    handle: *mut c_void,
}

// SAFETY: the handle is only given to `dlsym`, which any thread may call.
unsafe impl Send for Object {}
// SAFETY: as for `Send`; `dlsym` takes the linker's own lock.
unsafe impl Sync for Object {}

impl Object {
    /// Loads the object, or takes the one of this name that is loaded already. The linker's own words on failure.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        Self::with_flags(path, libc::RTLD_NOW | libc::RTLD_LOCAL)
    }

    /// The object of this name if the process has it already.
    pub(crate) fn loaded(name: &str) -> Option<Self> {
        Self::with_flags(Path::new(name), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD).ok()
    }

    /// Everything that the process has given to all: linked, preloaded, or opened with `RTLD_GLOBAL`.
    pub(crate) fn global() -> Self {
        Self {
            handle: libc::RTLD_DEFAULT,
        }
    }

    fn with_flags(path: &Path, flags: c_int) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| "the path holds a zero byte".to_owned())?;
        // SAFETY: a valid C string; what the object's constructors do is the business of who named it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if !handle.is_null() {
            return Ok(Self { handle });
        }
        // SAFETY: returns the text of this thread's last failure, or null.
        let text = unsafe { libc::dlerror() };
        Err(string(text).unwrap_or_else(|| "not found".to_owned()))
    }

    /// The address of a symbol in this object or in one that it depends on.
    pub(crate) fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: a live handle and a valid C string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// The file that the code at `address` was loaded from, links resolved.
pub(crate) fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the linker only compares the address with its maps, and fills the struct when it returns non-zero.
    let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) };
    if found == 0 {
        return None;
    }
    // SAFETY: filled, since the call returned non-zero (and it was zeroed before).
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string of the linker's that lives as long as the object, which is for ever.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
    Some(path.canonicalize().unwrap_or(path))
}

/// A C string as ours; null is nothing.
pub(crate) fn string(text: *const libc::c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and every caller has it from a C function that returns zero-terminated text which lives
    // at least until this thread's next call of that library.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}
