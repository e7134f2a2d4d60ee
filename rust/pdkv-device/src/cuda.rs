//! Whether a CUDA driver is here, found at run time: absent is a value, not a crash.
//!
//! Only detection. Nothing here creates a context or touches a device.

use std::ffi::{c_int, c_void};
use std::path::Path;

use crate::object::Object;

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

const LIBRARY: &str = "libcuda.so.1";
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
    let library = Object::open(Path::new(LIBRARY)).map_err(|reason| format!("no CUDA driver: {reason}"))?;
    let missing = |name: &str| format!("the CUDA driver lacks `{name}`");
    let init = library.symbol("cuInit").ok_or_else(|| missing("cuInit"))?;
    let version = library
        .symbol("cuDriverGetVersion")
        .ok_or_else(|| missing("cuDriverGetVersion"))?;
    let count = library
        .symbol("cuDeviceGetCount")
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
    let Some(library) = Object::loaded(LIBRARY) else {
        return false;
    };
    let Some(query) = library.symbol("cuPointerGetAttribute") else {
        return false;
    };
    // SAFETY: `cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr)`, unchanged since CUDA 4.0.
    let query: PointerAttribute = unsafe { std::mem::transmute(query) };
    let mut kind: u64 = 0;
    // SAFETY: the memory type is one unsigned int, for which `kind` has room; the address is only looked up.
    unsafe { query((&raw mut kind).cast(), MEMORY_TYPE, address) == 0 }
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
