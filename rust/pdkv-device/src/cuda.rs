//! Whether a CUDA driver is here, found at run time: absent is a value, not a crash.
//!
//! Only detection. Nothing here creates a context or touches a device.

use std::ffi::{CStr, c_char, c_int, c_void};

/// What a look for the driver found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// No usable driver, and why.
    Absent {
        /// The cause in words.
        reason: String,
    },
    /// A driver that initialises.
    Present {
        /// The CUDA version it speaks, as in `(13, 0)`.
        version: (u32, u32),
        /// How many devices it shows.
        devices: u32,
    },
}

type Init = unsafe extern "C" fn(u32) -> c_int;
type Query = unsafe extern "C" fn(*mut c_int) -> c_int;
type PointerAttribute = unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int;

const LIBRARY: &CStr = c"libcuda.so.1";
const MEMORY_TYPE: c_int = 2;

/// Looks for the driver by dlopen and asks it for its version and devices.
pub fn probe() -> Presence {
    match look() {
        Ok((version, devices)) => {
            let version = version.unsigned_abs();
            Presence::Present {
                version: (version / 1000, version % 1000 / 10),
                devices: devices.unsigned_abs(),
            }
        }
        Err(reason) => Presence::Absent { reason },
    }
}

fn look() -> Result<(c_int, c_int), String> {
    let library = Library::open(libc::RTLD_NOW | libc::RTLD_LOCAL)
        .ok_or_else(|| format!("no CUDA driver: {}", loader_error()))?;
    let missing = |name: &str| format!("the CUDA driver lacks `{name}`");
    let init = library.symbol(c"cuInit").ok_or_else(|| missing("cuInit"))?;
    let version = library
        .symbol(c"cuDriverGetVersion")
        .ok_or_else(|| missing("cuDriverGetVersion"))?;
    let count = library
        .symbol(c"cuDeviceGetCount")
        .ok_or_else(|| missing("cuDeviceGetCount"))?;
    // SAFETY: `cuInit` has had this signature since CUDA 2.0.
    let init: Init = unsafe { std::mem::transmute(init) };
    // SAFETY: `cuDriverGetVersion(int *)`, unchanged since CUDA 2.2.
    let version: Query = unsafe { std::mem::transmute(version) };
    // SAFETY: `cuDeviceGetCount(int *)`, unchanged since CUDA 2.0.
    let count: Query = unsafe { std::mem::transmute(count) };
    let ask = |query: Query, name: &str| {
        let mut value = 0;
        // SAFETY: the query writes one int through a pointer to a live one.
        match unsafe { query(&raw mut value) } {
            0 => Ok(value),
            status => Err(format!("`{name}` returned `{status}`")),
        }
    };
    // SAFETY: the flags must be 0, nothing else is asked of the caller.
    match unsafe { init(0) } {
        0 => {}
        100 => return Err("the CUDA driver finds no device".to_owned()),
        status => return Err(format!("`cuInit` returned `{status}`")),
    }
    Ok((ask(version, "cuDriverGetVersion")?, ask(count, "cuDeviceGetCount")?))
}

/// Whether the driver, if the process already uses it, knows the address as its own or as registered.
pub(crate) fn knows(address: u64) -> bool {
    let Some(library) = Library::open(libc::RTLD_NOW | libc::RTLD_NOLOAD) else {
        return false;
    };
    let Some(query) = library.symbol(c"cuPointerGetAttribute") else {
        return false;
    };
    // SAFETY: `cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr)`, unchanged since CUDA 4.0.
    let query: PointerAttribute = unsafe { std::mem::transmute(query) };
    let mut kind: u64 = 0;
    // SAFETY: the memory type is one unsigned int, for which `kind` has room; the address is only looked up.
    unsafe { query((&raw mut kind).cast(), MEMORY_TYPE, address) == 0 }
}

/// A handle on the driver library. It is never closed: the driver keeps threads of its own.
struct Library(*mut c_void);

impl Library {
    fn open(flags: c_int) -> Option<Self> {
        // SAFETY: the name is a C string; the driver's initialisers run as in any CUDA program.
        let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), flags) };
        (!handle.is_null()).then_some(Self(handle))
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is an open library, the name is a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}

fn loader_error() -> String {
    // SAFETY: no arguments; the text belongs to this thread until its next dl call.
    let text: *const c_char = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader gives no reason".to_owned();
    }
    // SAFETY: not null, so a C string that lives until the next dl call of this thread.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_and_presence_are_both_values() {
        match probe() {
            Presence::Absent { reason } => assert!(!reason.is_empty()),
            Presence::Present { version, .. } => assert!(version.0 >= 9),
        }
    }

    #[test]
    fn plain_memory_is_not_the_drivers() {
        let word = std::hint::black_box(7_u64);
        assert!(!knows((&raw const word).expose_provenance() as u64));
    }
}
