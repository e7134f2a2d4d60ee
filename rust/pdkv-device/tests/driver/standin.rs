//! The stand-in for the driver: compiled, opened, and asked what is alive in it.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use pdkv_core::plan::Plan;
use pdkv_core::span::Span;
use pdkv_device::cuda::{CopyQueue, Driver, Gpu, Kernels};
use pdkv_device::kernels::{Jobs, Wishes};

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
            if defines.contains(&"STANDIN_BARE") {
                "-O0"
            } else {
                "-O1"
            },
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

/// The whole stand-in, told to be another one: a copy of it with settings beside. `None` as for [`compile`].
pub(crate) fn variant(name: &str, settings: &[&str]) -> Option<PathBuf> {
    let (_, whole) = whole()?;
    let library = whole.with_file_name(format!("libcuda-{name}.so"));
    let fresh = whole.with_file_name(format!("libcuda-{name}-{}.so", std::process::id()));
    std::fs::write(&fresh, settings.join("\n")).unwrap();
    std::fs::rename(&fresh, library.with_extension("so.settings")).unwrap();
    // Never written in place, as above.
    std::fs::copy(whole, &fresh).unwrap();
    std::fs::rename(&fresh, &library).unwrap();
    Some(library)
}

/// The stand-in with kernels, opened once. Another process takes it as the test that started it has made it.
pub(crate) fn whole() -> Option<(Driver, &'static Path)> {
    static WHOLE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || match std::env::var_os(MADE) {
        Some(made) => Some(made.into()),
        None => compile("whole", &[]),
    };
    let path = WHOLE.get_or_init(make).as_deref()?;
    Some((Driver::open_at(path).unwrap(), path))
}

/// What other processes are told to load.
pub(crate) const MADE: &str = "PDKV_TEST_STANDIN";

/// What is alive, without what only counts calls.
pub(crate) fn alive(path: &Path) -> BTreeMap<String, i64> {
    let mut counts = counts(path);
    for calls in [
        "launches",
        "blocks",
        "waits",
        "blocking streams",
        "urgent streams",
        "most pinned bytes",
    ] {
        counts.remove(calls);
    }
    counts.retain(|name, count| *count != 0 && !name.starts_with("calls ") && !name.starts_with("launches "));
    counts
}

/// What is alive now and was not before: other tests open GPUs for good.
pub(crate) fn since(path: &Path, before: &BTreeMap<String, i64>) -> BTreeMap<String, i64> {
    let mut now = alive(path);
    for (name, count) in before {
        *now.entry(name.clone()).or_default() -= count;
    }
    now.retain(|_, count| *count != 0);
    now
}

/// All counts.
pub(crate) fn counts(path: &Path) -> BTreeMap<String, i64> {
    // SAFETY: the stand-in declares it so.
    let report: extern "C" fn() -> *const c_char = unsafe { std::mem::transmute(symbol(path, c"standin_report")) };
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

/// Looks until that has asked the driver so many more times how far it is.
pub(crate) fn asked_again(path: &Path, times: i64, mut look: impl FnMut()) {
    let asked = || {
        let calls = calls(path);
        ["cuEventQuery", "cuStreamQuery"].map(|name| calls.get(name).copied().unwrap_or(0))
    };
    let before: i64 = asked().iter().sum();
    while asked().iter().sum::<i64>() < before + times {
        look();
    }
}

/// Copies by a kernel, which reaches what its GPU was given access to and nothing else.
pub(crate) fn kernel_copy(gpu: &Gpu, from: u64, to: u64, len: u64) {
    let span = [Span::new(0, 0, len)];
    let plan = Plan::spans(&span, &[len], &span, &[len]).unwrap();
    let jobs = Jobs::of(&plan, &[from], &[to]).unwrap();
    // SAFETY: the stand-in's image, whole; its kernels are those of this release.
    let kernels = unsafe { Kernels::load(gpu.context(), IMAGE) }.unwrap();
    let mut queue = CopyQueue::new(&kernels).unwrap();
    // SAFETY: the caller's memory lives until the wait below.
    let ticket = unsafe { queue.post(&jobs, Wishes::default()) }.unwrap();
    queue.wait(ticket.unwrap()).unwrap();
}

/// Holds back what is asked: 1 all of it, 2 kernels, 0 nothing any more.
pub(crate) fn hold(path: &Path, hold: c_int) {
    // SAFETY: the stand-in declares it so.
    let call: extern "C" fn(c_int) -> c_int = unsafe { std::mem::transmute(symbol(path, c"standin_hold")) };
    call(hold);
}

/// While this is there, nothing that is asked happens; so that a test which fails meanwhile ends.
pub(crate) struct Held<'a>(&'a Path);

impl<'a> Held<'a> {
    pub(crate) fn new(path: &'a Path) -> Self {
        hold(path, 1);
        Self(path)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        reset(self.0);
        hold(self.0, 0);
    }
}

/// While this is there, everything happens as soon as it is asked.
pub(crate) struct Eager<'a>(&'a Path);

impl<'a> Eager<'a> {
    pub(crate) fn new(path: &'a Path) -> Self {
        eager(path, true);
        Self(path)
    }
}

impl Drop for Eager<'_> {
    fn drop(&mut self) {
        eager(self.0, false);
    }
}

fn eager(path: &Path, on: bool) {
    // SAFETY: the stand-in declares it so.
    let call: extern "C" fn(c_int) -> c_int = unsafe { std::mem::transmute(symbol(path, c"standin_eager")) };
    call(c_int::from(on));
}

/// Makes the `nth` coming call of a name return a status; see the stand-in.
pub(crate) fn fail(path: &Path, call: &CStr, nth: c_int, status: c_int) {
    type Fail = extern "C" fn(*const c_char, c_int, c_int) -> c_int;
    // SAFETY: the stand-in declares it so.
    let fail: Fail = unsafe { std::mem::transmute(symbol(path, c"standin_fail")) };
    fail(call.as_ptr(), nth, status);
}

/// Somebody captures a graph, of a stream if one is named, or no longer.
pub(crate) fn capture(path: &Path, stream: u64, on: bool) {
    // SAFETY: the stand-in declares it so.
    let call: extern "C" fn(u64, c_int) -> c_int = unsafe { std::mem::transmute(symbol(path, c"standin_capture")) };
    call(stream, c_int::from(on));
}

/// No more failures, past ones forgotten.
pub(crate) fn reset(path: &Path) {
    // SAFETY: the stand-in declares it so.
    let reset: extern "C" fn() -> c_int = unsafe { std::mem::transmute(symbol(path, c"standin_reset")) };
    reset();
}

/// Memory of `count` allocations of `granules` x 2 MiB side by side, that allow `types` of handles.
pub(crate) fn segments(path: &Path, ordinal: c_int, count: c_int, granules: c_int, types: c_int) -> u64 {
    type Segments = extern "C" fn(c_int, c_int, c_int, c_int) -> u64;
    // SAFETY: the stand-in declares it so.
    let segments: Segments = unsafe { std::mem::transmute(symbol(path, c"standin_segments")) };
    let address = segments(ordinal, count, granules, types);
    assert_ne!(address, 0);
    address
}

/// Puts other memory at the addresses of one segment.
pub(crate) fn replace(path: &Path, address: u64) {
    // SAFETY: the stand-in declares it so.
    let replace: extern "C" fn(u64) -> c_int = unsafe { std::mem::transmute(symbol(path, c"standin_replace")) };
    assert_eq!(replace(address), 0);
}

/// Memory of a pool or, with `managed`, such that the driver moves.
pub(crate) fn other_memory(path: &Path, ordinal: c_int, bytes: u64, managed: c_int) -> u64 {
    type Other = extern "C" fn(c_int, u64, c_int) -> u64;
    // SAFETY: the stand-in declares it so.
    let other: Other = unsafe { std::mem::transmute(symbol(path, c"standin_other")) };
    other(ordinal, bytes, managed)
}

fn symbol(path: &Path, name: &CStr) -> *mut c_void {
    let file = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a C string; the library is loaded already, and this finds it again.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!handle.is_null());
    // SAFETY: an open library and a C string.
    let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!symbol.is_null());
    symbol
}
