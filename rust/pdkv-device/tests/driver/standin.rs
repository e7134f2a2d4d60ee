//! The stand-in for the driver: compiled, opened, and asked what is alive in it.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use pdkv_device::cuda::Driver;

/// One test at a time, since all of them count what is alive.
pub(crate) static ALONE: Mutex<()> = Mutex::new(());

/// What the stand-in's image is.
pub(crate) const IMAGE: &[u8] = b"\x7fELFstand-in....";

/// Compiles a stand-in; `None`, with the reason printed, where there is no compiler.
pub(crate) fn compile(name: &str, defines: &[&str]) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("standin");
    std::fs::create_dir_all(&folder).unwrap();
    let library = folder.join(format!("libcuda-{name}.so"));
    // Never written in place: another test process may have it mapped.
    let fresh = folder.join(format!("libcuda-{name}-{}.so", std::process::id()));
    let output = Command::new("c++")
        .args([
            "-std=c++17",
            "-O1",
            "-g",
            "-shared",
            "-fPIC",
            "-fno-strict-aliasing",
            "-fvisibility=hidden",
        ])
        .args([
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
            "-Wno-maybe-uninitialized",
        ])
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg("-I")
        .arg(here.join("../../cuda"))
        .arg("-I")
        .arg(here.join("tests/kernels"))
        .args([Path::new("-o"), &fresh, &here.join("tests/driver/standin.cpp")])
        .output();
    match output {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            std::fs::rename(&fresh, &library).unwrap();
            Some(library)
        }
        Err(error) => {
            assert!(
                std::env::var_os("PDKV_CXX_REQUIRED").is_none(),
                "no C++ compiler, and PDKV_CXX_REQUIRED is set: {error}"
            );
            println!("skipped: no C++ compiler ({error})");
            None
        }
    }
}

/// The stand-in with kernels, opened once.
pub(crate) fn whole() -> Option<(Driver, &'static Path)> {
    static WHOLE: std::sync::OnceLock<Option<PathBuf>> = std::sync::OnceLock::new();
    let path = WHOLE.get_or_init(|| compile("whole", &[])).as_deref()?;
    Some((Driver::open_at(path).unwrap(), path))
}

/// What is alive, without what only counts calls.
pub(crate) fn alive(path: &Path) -> BTreeMap<String, i64> {
    let mut counts = counts(path);
    for calls in ["launches", "waits", "blocking streams"] {
        counts.remove(calls);
    }
    counts.retain(|name, count| *count != 0 && !name.starts_with("calls "));
    counts
}

/// All counts.
pub(crate) fn counts(path: &Path) -> BTreeMap<String, i64> {
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a C string; the library is loaded already, and this finds it again.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!handle.is_null());
    // SAFETY: an open library and a C string.
    let symbol = unsafe { libc::dlsym(handle, c"standin_report".as_ptr()) };
    assert!(!symbol.is_null());
    // SAFETY: the stand-in declares it so.
    let report: extern "C" fn() -> *const c_char = unsafe { std::mem::transmute(symbol) };
    // SAFETY: a C string that stays until the next call, and tests run one at a time.
    let text = unsafe { CStr::from_ptr(report()) }.to_str().unwrap();
    text.lines()
        .map(|line| {
            let (name, count) = line.split_once('=').unwrap();
            (name.to_owned(), count.parse().unwrap())
        })
        .collect()
}

/// How often each function of the driver was called, by its name.
pub(crate) fn calls(path: &Path) -> BTreeMap<String, i64> {
    let named = |(name, count): (String, i64)| Some((name.strip_prefix("calls ")?.to_owned(), count));
    counts(path).into_iter().filter_map(named).collect()
}
