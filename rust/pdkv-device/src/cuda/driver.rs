//! The driver library: loaded, asked for its functions, started. What it cannot be used for is a typed refusal.

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pdkv_core::{Error, ErrorKind, Result};

use super::abi::Functions;
use super::batch::Batch;
use super::device::Device;
use super::numbers::CUDA_ERROR_NO_DEVICE;
use crate::object::{Object, file_of};

/// The name under which the system's linker knows it.
const LIBRARY: &str = "libcuda.so.1";
/// Names another library to load in its place.
const LIBRARY_SETTING: &str = "PDKV_CUDA_LIBRARY";

/// The oldest driver that loads what an NVRTC of CUDA 12 makes.
const OLDEST: (u32, u32) = (12, 0);

/// The one that was opened by its name last, and where that led.
static LAST: Mutex<Option<(PathBuf, Driver)>> = Mutex::new(None);

/// A started driver. Cloning is cheap; the code stays loaded for the life of the process.
#[derive(Clone)]
pub struct Driver(Arc<Loaded>);

struct Loaded {
    functions: Functions,
    version: (u32, u32),
    batch: OnceLock<Batch>,
    /// The process that started it. A fork of it has neither the driver's threads nor its mappings.
    process: u32,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("version", &self.version()).finish()
    }
}

impl Driver {
    /// The system's driver, or the one that the environment names by `PDKV_CUDA_LIBRARY`.
    ///
    /// # Errors
    /// `Unsupported` when there is none, it is older than 12.0, does not start, shows no device, or was started before this process was
    /// forked.
    pub fn open() -> Result<Self> {
        let path = library();
        // By each transfer, so that no library is looked into again.
        if let Some(known) = Self::last(&path) {
            known.usable()?;
            return Ok(known);
        }
        let opened = Self::open_at(&path).map_err(|error| match std::env::var_os(LIBRARY_SETTING) {
            Some(name) if error.hint().is_none() && !name.is_empty() => {
                error.with_hint(format!("the environment names it by {LIBRARY_SETTING}"))
            }
            _ if error.hint().is_none() => error.with_hint(HINT),
            _ => error,
        })?;
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some((path, opened.clone()));
        Ok(opened)
    }

    /// The same if [`open`](Self::open) has started it; `None` if not. Loads nothing and waits for nobody.
    pub fn started() -> Option<Self> {
        Self::last(&library())
    }

    fn last(path: &Path) -> Option<Self> {
        let last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref()
            .filter(|(of, _)| of == path)
            .map(|(_, known)| known.clone())
    }

    /// The driver at a path.
    ///
    /// # Errors
    /// As [`Driver::open`].
    pub fn open_at(path: &Path) -> Result<Self> {
        static OPENED: Mutex<Vec<(usize, Driver)>> = Mutex::new(Vec::new());
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let object = Object::open(path).map_err(|reason| refuse(format!("no CUDA driver: {reason}")))?;
        let functions = Functions::resolve(&object).map_err(|name| {
            let what = file_of(object.symbol("cuInit").unwrap_or_default()).unwrap_or_else(|| path.to_owned());
            refuse(format!("the CUDA driver `{}` lacks `{name}`", what.display()))
        })?;
        let identity = functions.cuInit as usize;
        if let Some((_, known)) = opened.iter().find(|(known, _)| *known == identity) {
            known.usable()?;
            return Ok(known.clone());
        }
        let version = functions.version()?;
        if version < OLDEST {
            let (major, minor) = version;
            return Err(refuse(format!(
                "the CUDA driver speaks CUDA `{major}.{minor}`, `{}.{}` or newer is needed",
                OLDEST.0, OLDEST.1
            )));
        }
        // SAFETY: the flags must be 0, nothing else is asked of the caller.
        match unsafe { (functions.cuInit)(0) } {
            0 => {}
            CUDA_ERROR_NO_DEVICE => return Err(refuse(NO_DEVICE.to_owned()).with_hint(NO_DEVICE_HINT)),
            status => {
                let reason = functions.failure("cuInit", status);
                return Err(refuse(format!("the CUDA driver does not start: {reason}")));
            }
        }
        let driver = Self(Arc::new(Loaded {
            functions,
            version,
            batch: OnceLock::new(),
            process: std::process::id(),
        }));
        if driver.device_count()? == 0 {
            return Err(refuse(NO_DEVICE.to_owned()).with_hint(NO_DEVICE_HINT));
        }
        opened.push((identity, driver.clone()));
        Ok(driver)
    }

    /// The CUDA release that it speaks, as in `(13, 0)`.
    pub fn version(&self) -> (u32, u32) {
        self.0.version
    }

    /// Number of devices that this process may see; at least 1 when the driver was opened.
    ///
    /// # Errors
    /// `Device` when the driver fails.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: an integer of ours to write to.
        let status = unsafe { (self.functions().cuDeviceGetCount)(&raw mut count) };
        self.check("cuDeviceGetCount", status)?;
        Ok(count.unsigned_abs())
    }

    /// The device of a number.
    ///
    /// # Errors
    /// `Device` when there is no such device.
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        Device::new(self, ordinal)
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// The call for many copies at once, looked for when it is first asked for.
    pub(super) fn batch(&self) -> &Batch {
        self.0.batch.get_or_init(|| Batch::find(self))
    }

    /// A number that is the same for handles of one library.
    pub(super) fn identity(&self) -> usize {
        self.functions().cuInit as usize
    }

    /// Whether this is the process that started the driver.
    ///
    /// # Errors
    /// `Unsupported` in a fork of it, where calls would fail or wait for threads that are not there.
    pub(super) fn usable(&self) -> Result<()> {
        let process = std::process::id();
        if process == self.0.process {
            return Ok(());
        }
        let message = format!(
            "the CUDA driver was started by process `{}`, of which this one, `{process}`, is a fork",
            self.0.process
        );
        Err(Error::new(ErrorKind::Unsupported, "use the GPU", message).with_hint(
            "start processes that use a GPU with `spawn` or `forkserver`, or fork before the GPU is first used",
        ))
    }

    /// Whether a call went well.
    ///
    /// # Errors
    /// `Device`, naming the call, the status and the driver's words for it.
    pub(super) fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        self.functions().check(call, status)
    }
}

const NO_DEVICE: &str = "the CUDA driver finds no device";
const HINT: &str = "memory of GPUs needs NVIDIA's driver for CUDA 12.0 or newer; a container needs the NVIDIA runtime \
                    (`--gpus all`). Host memory needs none";
const NO_DEVICE_HINT: &str =
    "look at CUDA_VISIBLE_DEVICES, and whether a GPU in MIG mode has any instance (`nvidia-smi -L`)";

/// What is loaded as the driver.
fn library() -> PathBuf {
    let named = std::env::var_os(LIBRARY_SETTING).filter(|name| !name.is_empty());
    PathBuf::from(named.unwrap_or_else(|| LIBRARY.into()))
}

/// The driver, if the process has it loaded already.
pub(super) fn loaded() -> Option<Object> {
    Object::loaded(&library())
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, "load the CUDA driver", message)
}

impl Functions {
    fn version(&self) -> Result<(u32, u32)> {
        let mut version = 0;
        // SAFETY: an integer of ours to write to; allowed before `cuInit`.
        let status = unsafe { (self.cuDriverGetVersion)(&raw mut version) };
        self.check("cuDriverGetVersion", status)?;
        let version = version.unsigned_abs();
        Ok((version / 1000, version % 1000 / 10))
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Device, "use the GPU", self.failure(call, status))
            .with("call", call)
            .with("status", status))
    }

    fn failure(&self, call: &str, status: c_int) -> String {
        let name = text(self.cuGetErrorName, status);
        let words = text(self.cuGetErrorString, status);
        format!("`{call}` returned `{status}` ({name}: {words})")
    }
}

/// A status in the driver's words.
fn text(of: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int, status: c_int) -> String {
    let mut text = std::ptr::null();
    // SAFETY: takes any status, and a pointer of ours to write to.
    let found = unsafe { of(status, &raw mut text) };
    if found != 0 || text.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: not null, so a C string of the driver's that lives as long as it.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
