//! A shared object of the dynamic linker: opened, asked for symbols, never closed.
//!
//! The driver and the compiler keep threads and exit handlers of their own, so unloading them can't be made safe. Nothing is known
//! here of what they do.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// A handle of `dlopen`; the object stays loaded for the life of the process.
pub(crate) struct Object(*mut c_void);

// SAFETY: the handle is only given to `dlsym`, which any thread may call.
unsafe impl Send for Object {}
// SAFETY: as for `Send`; `dlsym` takes the linker's own lock.
unsafe impl Sync for Object {}

impl Object {
    /// Loads the object, or takes the one of this name that is loaded already.
    ///
    /// # Errors
    /// The linker's own words.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        Self::with_flags(path, libc::RTLD_NOW | libc::RTLD_LOCAL)
    }

    /// The object of this name if the process has it already.
    pub(crate) fn loaded(name: &Path) -> Option<Self> {
        Self::with_flags(name, libc::RTLD_NOW | libc::RTLD_NOLOAD).ok()
    }

    fn with_flags(path: &Path, flags: c_int) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| "the path holds a zero byte".to_owned())?;
        // SAFETY: a C string; what the object's constructors do is the business of who named it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if handle.is_null() {
            Err(loader_error())
        } else {
            Ok(Self(handle))
        }
    }

    /// The address of a symbol in this object or in one that it depends on.
    pub(crate) fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is an open library, the name is a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}

/// The file that the code at `address` was loaded from.
pub(crate) fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the linker only compares the address with its maps, and fills the struct when it returns non-zero.
    let found = unsafe { libc::dladdr(address, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string of the linker's that lives as long as the object, which is for ever.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
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

/// Declares a table of C functions that is filled from an object by their names.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $( fn $name:ident($($argument:ty),* $(,)?) -> $result:ty; )+ }) => {
        $(#[$doc])*
        #[expect(non_snake_case, reason = "the names of the C functions")]
        pub(crate) struct $table { $( pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $result, )+ }

        impl $table {
            /// For each function its name, and of each argument the size and whether it is a pointer.
            #[cfg(test)]
            #[allow(dead_code, reason = "not every table has a header to be compared with")]
            pub(crate) fn signatures() -> Vec<(&'static str, Vec<(usize, bool)>)> {
                vec![ $( (stringify!($name), vec![ $( (
                    size_of::<$argument>(),
                    std::any::type_name::<$argument>().starts_with('*'),
                ) ),* ]), )+ ]
            }

            /// Finds every function.
            ///
            /// # Errors
            /// The name of the first function that is missing.
            pub(crate) fn resolve(object: &$crate::object::Object) -> Result<Self, &'static str> {
                Ok(Self { $( $name: {
                    let symbol = object.symbol(stringify!($name)).ok_or(stringify!($name))?;
                    // SAFETY: the table declares the function as its library documents it, and its ABI doesn't change under one name.
                    unsafe { std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> $result>(symbol) }
                }, )+ })
            }
        }
    };
}
pub(crate) use functions;
