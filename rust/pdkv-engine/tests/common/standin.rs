//! The stand-in for the driver of a GPU. A test that wants it runs once more in a process of its own, which finds it by the
//! settings that anybody can make; so no two tests share its state.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const LIBRARY: &str = "PDKV_CUDA_LIBRARY";
const IMAGE: &str = "PDKV_CUDA_IMAGE";

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Builds it once; `None`, with the reason printed, where there is no compiler.
fn build() -> Option<&'static [PathBuf; 2]> {
    static BUILT: OnceLock<Option<[PathBuf; 2]>> = OnceLock::new();
    let make = || {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let compiler = Command::new("c++").arg("--version").output();
        if let Err(error) = compiler {
            assert!(
                std::env::var_os("PDKV_CXX_REQUIRED").is_none(),
                "no C++ compiler, and PDKV_CXX_REQUIRED is set: {error}"
            );
            writeln!(std::io::stderr(), "skipped: no C++ compiler ({error})").expect("a place to say so");
            return None;
        }
        let output = Command::new(root.join("scripts/standin-cuda.sh"))
            .arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("standin"))
            .output()
            .expect("the script runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let told = String::from_utf8(output.stdout).expect("two paths");
        let mut paths = told.lines().map(PathBuf::from);
        Some([paths.next().expect("a library"), paths.next().expect("an image")])
    };
    BUILT.get_or_init(make).as_ref()
}

/// Whether this process has the stand-in for its driver. If not, the test of that name is run in one that has, and must pass.
pub(crate) fn is_here(test: &str) -> bool {
    is_here_with(test, &[])
}

/// As [`is_here`], for UCX's module for CUDA too, which finds the stand-in where the linker looks for a driver.
pub(crate) fn is_here_for_ucx(test: &str, settings: &[(&str, &str)]) -> bool {
    // Once there it is not made anew: a process that has it must not find another beside it.
    if std::env::var_os(LIBRARY).is_some() {
        return true;
    }
    let beside = build().map(|[library, _]| library.with_file_name("lib"));
    let folder = beside.as_ref().map(|folder| folder.to_str().expect("text"));
    let mut all = settings.to_vec();
    all.push(("LD_LIBRARY_PATH", folder.unwrap_or_default()));
    is_here_with(test, &all)
}

/// As [`is_here`], with more settings.
pub(crate) fn is_here_with(test: &str, settings: &[(&str, &str)]) -> bool {
    if std::env::var_os(LIBRARY).is_some() {
        return true;
    }
    if let Some([library, image]) = build() {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", test, "--nocapture"])
            .env(LIBRARY, library)
            .env(IMAGE, image)
            .envs(settings.iter().copied())
            .output()
            .expect("the test starts");
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        assert!(
            output.status.success(),
            "{test}: {}\n{}",
            output.status,
            text.join("\n")
        );
        assert!(text[0].contains("1 passed"), "no test is named `{test}`:\n{}", text[0]);
    }
    false
}

fn function(name: &CStr) -> *mut c_void {
    let path = std::env::var(LIBRARY).expect("the stand-in is here");
    let path = CString::new(path).expect("a path");
    // SAFETY: a C string; loading the stand-in runs no code of its own, and it may be loaded already.
    let library = unsafe { dlopen(path.as_ptr(), 2) };
    assert!(!library.is_null(), "the stand-in can't be loaded");
    // SAFETY: an open library and a C string.
    let found = unsafe { dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "the stand-in has no {name:?}");
    found
}

/// While this is held, streams do not go on.
pub(crate) struct Hold(());

impl Hold {
    /// Before the next kernel.
    pub(crate) fn kernels() -> Self {
        hold(2);
        Self(())
    }

    /// At all.
    pub(crate) fn everything() -> Self {
        hold(1);
        Self(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        hold(0);
    }
}

fn hold(on: c_int) {
    // SAFETY: declared so by the stand-in.
    let call: extern "C" fn(c_int) = unsafe { std::mem::transmute(function(c"standin_hold")) };
    call(on);
}

/// Has the `nth` call of that name from now on answer with `status`.
pub(crate) fn fail(call: &CStr, nth: c_int, status: c_int) {
    // SAFETY: declared so by the stand-in.
    let tell: extern "C" fn(*const c_char, c_int, c_int) = unsafe { std::mem::transmute(function(c"standin_fail")) };
    tell(call.as_ptr(), nth, status);
}

/// Nothing fails any more.
pub(crate) fn reset() {
    // SAFETY: declared so by the stand-in.
    let reset: extern "C" fn() -> c_int = unsafe { std::mem::transmute(function(c"standin_reset")) };
    reset();
}

/// Memory of GPU 0 in `count` allocations of 2 MiB side by side, whose descriptors can be had.
pub(crate) fn segments(count: c_int) -> u64 {
    // SAFETY: declared so by the stand-in.
    let make: extern "C" fn(c_int, c_int, c_int, c_int) -> u64 =
        unsafe { std::mem::transmute(function(c"standin_segments")) };
    let address = make(0, count, 1, 1);
    assert_ne!(address, 0, "no segments");
    address
}

/// Puts other memory at the addresses of one allocation of [`segments`], as an allocator does that moves what it has.
pub(crate) fn replace(address: u64) {
    // SAFETY: declared so by the stand-in.
    let replace: extern "C" fn(u64) -> c_int = unsafe { std::mem::transmute(function(c"standin_replace")) };
    assert_eq!(replace(address), 0, "no segment at {address:#x}");
}

/// What the stand-in has counted under this name.
pub(crate) fn count(name: &str) -> i64 {
    // SAFETY: declared so by the stand-in.
    let report: extern "C" fn() -> *const c_char = unsafe { std::mem::transmute(function(c"standin_report")) };
    // SAFETY: a C string that stays until the next call, and a test asks from one thread.
    let text = unsafe { CStr::from_ptr(report()) }.to_str().expect("text");
    let line = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .find(|(key, _)| *key == name);
    line.map_or(0, |(_, count)| count.parse().expect("a number"))
}
