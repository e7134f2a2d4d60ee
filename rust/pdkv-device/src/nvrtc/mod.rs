//! NVRTC, NVIDIA's compiler as a library, found at run time: absent or too old is a value with its reason.
//!
//! One text in, one image for one kind of device out. Nothing is known here of what is compiled, and no driver is needed. Compiled
//! images are kept by [`Cache`].

mod cache;
mod figures;
mod places;
mod target;

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pdkv_core::{Error, ErrorKind, Result};

pub use cache::{Cache, Key, Stock};
pub use figures::{Figures, figures};
pub use places::places;
pub use target::Target;

use crate::object::{Object, file_of, functions};

/// A `nvrtcProgram`.
type Program = *mut std::ffi::c_void;

functions! {
    /// The functions of NVRTC that are used; all are there from CUDA 11.2 on, with these signatures.
    Functions {
        fn nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
        fn nvrtcGetErrorString(c_int) -> *const c_char;
        fn nvrtcGetNumSupportedArchs(*mut c_int) -> c_int;
        fn nvrtcGetSupportedArchs(*mut c_int) -> c_int;
        fn nvrtcCreateProgram(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        fn nvrtcDestroyProgram(*mut Program) -> c_int;
        fn nvrtcCompileProgram(Program, c_int, *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize(Program, *mut usize) -> c_int;
        fn nvrtcGetProgramLog(Program, *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(Program, *mut usize) -> c_int;
        fn nvrtcGetCUBIN(Program, *mut c_char) -> c_int;
        fn nvrtcGetPTXSize(Program, *mut usize) -> c_int;
        fn nvrtcGetPTX(Program, *mut c_char) -> c_int;
    }
}

/// The names under which the linker may know one, newest first.
const NAMES: [(u32, &str); 2] = [(13, "libnvrtc.so.13"), (12, "libnvrtc.so.12")];

/// The oldest release that knows all instructions of the kernels.
const OLDEST: (u32, u32) = (12, 0);

/// A loaded NVRTC. Cloning is cheap; the code stays loaded for the life of the process.
#[derive(Clone)]
pub struct Nvrtc(Arc<Loaded>);

struct Loaded {
    functions: Functions,
    version: (u32, u32),
    path: PathBuf,
    archs: Vec<u32>,
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Loaded { version, path, .. } = &*self.0;
        f.debug_struct("Nvrtc")
            .field("version", version)
            .field("path", path)
            .finish()
    }
}

/// What is to be compiled.
#[derive(Clone, Copy, Debug)]
pub struct Unit<'a> {
    /// A name, for messages.
    pub name: &'a str,
    /// The text.
    pub source: &'a str,
    /// What it includes: names and texts.
    pub headers: &'a [(&'a str, &'a str)],
}

/// What the compiler made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The image that a driver loads: a cubin, or PTX that ends in a zero byte.
    pub image: Vec<u8>,
    /// What the compiler said; empty from a cache.
    pub log: String,
}

/// Options beside the architecture. `-v` makes the assembler name registers and spills in the log.
pub const OPTIONS: &[&str] = &["--std=c++17", "--ptxas-options=-v"];

impl Nvrtc {
    /// The first usable one of `places` (files, as a caller knows them from installed packages) and of what the dynamic linker
    /// finds. One newer than `driver`, the CUDA release that the driver speaks, is passed over: its images may not load.
    ///
    /// # Errors
    /// `Unsupported`, with the reason of each that was tried.
    pub fn find(places: &[PathBuf], driver: Option<(u32, u32)>) -> Result<Self> {
        let mut reasons = Vec::new();
        let named = NAMES.iter().map(|(_, name)| PathBuf::from(name));
        for place in places.iter().cloned().chain(named) {
            match Self::open(&place) {
                Ok(found) if driver.is_none_or(|driver| found.version().0 <= driver.0) => return Ok(found),
                Ok(found) => reasons.push(format!(
                    "`{}` is of CUDA `{}`, the driver speaks `{}`",
                    place.display(),
                    dotted(found.version()),
                    dotted(driver.unwrap_or_default())
                )),
                Err(error) => reasons.push(error.message().to_owned()),
            }
        }
        Err(unsupported(format!("no usable NVRTC: {}", reasons.join("; "))))
    }

    /// Loads the NVRTC at `path`, or of that name.
    ///
    /// # Errors
    /// `Unsupported` when there is none, it lacks a function, or it is older than 12.0.
    pub fn open(path: &Path) -> Result<Self> {
        static OPENED: Mutex<Vec<Nvrtc>> = Mutex::new(Vec::new());
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let object = Object::open(path)
            .map_err(|reason| unsupported(format!("`{}` can't be loaded: {reason}", path.display())))?;
        let functions =
            Functions::resolve(&object).map_err(|name| unsupported(format!("`{}` lacks `{name}`", path.display())))?;
        let path = file_of(functions.nvrtcVersion as *const _).unwrap_or_else(|| path.to_owned());
        if let Some(known) = opened.iter().find(|known| known.0.path == path) {
            return Ok(known.clone());
        }
        let version = functions
            .version()
            .map_err(|reason| unsupported(format!("`{}`: {reason}", path.display())))?;
        if version < OLDEST {
            return Err(unsupported(format!(
                "`{}` is of CUDA `{}`, `{}` or newer is needed",
                path.display(),
                dotted(version),
                dotted(OLDEST)
            )));
        }
        // It asks the linker for its other half by name only, and finds it beside itself only if that is loaded already.
        if let Some(folder) = path.parent() {
            let name = format!("libnvrtc-builtins.so.{}", dotted(version));
            let _ = Object::open(&folder.join(name));
        }
        let archs = functions
            .archs()
            .map_err(|reason| unsupported(format!("`{}`: {reason}", path.display())))?;
        let found = Self(Arc::new(Loaded {
            functions,
            version,
            path,
            archs,
        }));
        opened.push(found.clone());
        Ok(found)
    }

    /// The CUDA release that it belongs to, as in `(13, 0)`.
    pub fn version(&self) -> (u32, u32) {
        self.0.version
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The architectures that it compiles for, as in `90`, ascending.
    pub fn archs(&self) -> &[u32] {
        &self.0.archs
    }

    /// Compiles a unit. Takes a second or more.
    ///
    /// # Errors
    /// `Device` when the unit does not compile; the log is in the error's context.
    pub fn compile(&self, unit: &Unit<'_>, target: Target, options: &[&str]) -> Result<Compiled> {
        let program = Running::create(&self.0.functions, unit)?;
        let arch = target.option();
        let texts = std::iter::once(arch.as_str())
            .chain(options.iter().copied())
            .map(c_string)
            .collect::<Result<Vec<_>>>()?;
        let pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
        let f = program.functions;
        let options = count(&pointers)?;
        // SAFETY: a live program, and as many C strings as are said, which outlive the call.
        let status = unsafe { (f.nvrtcCompileProgram)(program.program, options, pointers.as_ptr()) };
        let log = program.bytes(f.nvrtcGetProgramLogSize, f.nvrtcGetProgramLog)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        f.check("nvrtcCompileProgram", status)
            .map_err(|error| error.with("log", &log))?;
        let image = match target {
            Target::Cubin(_) => program.bytes(f.nvrtcGetCUBINSize, f.nvrtcGetCUBIN)?,
            Target::Ptx(_) => program.bytes(f.nvrtcGetPTXSize, f.nvrtcGetPTX)?,
        };
        Ok(Compiled { image, log })
    }
}

impl Functions {
    fn version(&self) -> Result<(u32, u32), String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two integers of ours to write to.
        let status = unsafe { (self.nvrtcVersion)(&raw mut major, &raw mut minor) };
        self.check("nvrtcVersion", status)
            .map_err(|error| error.message().to_owned())?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    fn archs(&self) -> Result<Vec<u32>, String> {
        let mut count = 0;
        // SAFETY: an integer of ours to write to.
        let status = unsafe { (self.nvrtcGetNumSupportedArchs)(&raw mut count) };
        self.check("nvrtcGetNumSupportedArchs", status)
            .map_err(|error| error.message().to_owned())?;
        let mut archs: Vec<c_int> = vec![0; count.unsigned_abs() as usize];
        // SAFETY: room for as many integers as it just said.
        let status = unsafe { (self.nvrtcGetSupportedArchs)(archs.as_mut_ptr()) };
        self.check("nvrtcGetSupportedArchs", status)
            .map_err(|error| error.message().to_owned())?;
        let mut archs: Vec<u32> = archs.into_iter().map(c_int::unsigned_abs).collect();
        archs.sort_unstable();
        Ok(archs)
    }

    fn check(&self, call: &str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: takes any status.
        let text = unsafe { (self.nvrtcGetErrorString)(status) };
        let text = if text.is_null() {
            "no text".into()
        } else {
            // SAFETY: not null, so a C string of the library's that lives as long as it.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        let message = format!("`{call}` returned `{status}`: {text}");
        Err(Error::new(ErrorKind::Device, "compile kernels", message))
    }
}

/// A program, destroyed when dropped.
struct Running<'a> {
    functions: &'a Functions,
    program: Program,
}

impl<'a> Running<'a> {
    fn create(functions: &'a Functions, unit: &Unit<'_>) -> Result<Self> {
        let (name, source) = (c_string(unit.name)?, c_string(unit.source)?);
        let names = unit
            .headers
            .iter()
            .map(|(name, _)| c_string(name))
            .collect::<Result<Vec<_>>>()?;
        let texts = unit
            .headers
            .iter()
            .map(|(_, text)| c_string(text))
            .collect::<Result<Vec<_>>>()?;
        let name_pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let text_pointers: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        let headers = count(&text_pointers)?;
        // SAFETY: C strings and two lists of them of one length, which outlive the call; the library copies them.
        let status = unsafe {
            (functions.nvrtcCreateProgram)(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                headers,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        functions.check("nvrtcCreateProgram", status)?;
        Ok(Self { functions, program })
    }

    /// What a pair of functions gives: how many bytes, and the bytes.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>> {
        let mut length = 0;
        // SAFETY: a live program and a number of ours to write to.
        let status = unsafe { size(self.program, &raw mut length) };
        self.functions.check("the size of a result", status)?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: a live program, and room for as many bytes as it just said.
        let status = unsafe { fill(self.program, bytes.as_mut_ptr().cast()) };
        self.functions.check("a result", status)?;
        Ok(bytes)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // SAFETY: created by the library and not destroyed before; the status can only say that it is none.
        unsafe { (self.functions.nvrtcDestroyProgram)(&raw mut self.program) };
    }
}

/// The length of a list, as C counts.
fn count(list: &[*const c_char]) -> Result<c_int> {
    c_int::try_from(list.len())
        .map_err(|_| Error::new(ErrorKind::Internal, "compile kernels", "a list is too long for C"))
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| {
        let message = "a text to compile holds a zero byte";
        Error::new(ErrorKind::Internal, "compile kernels", message)
    })
}

fn dotted((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, "load NVRTC", message).with_hint(
        "NVRTC comes with the CUDA toolkit, with torch, and as `nvidia-cuda-nvrtc` (CUDA 13) or `nvidia-cuda-nvrtc-cu12`",
    )
}
