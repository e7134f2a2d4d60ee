//! Where kernels come from, over a stand-in for the compiler that makes what the stand-in for the driver takes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::PoisonError;

use pdkv_core::ErrorKind;
use pdkv_device::cuda::{Context, Origin, Sources};
use pdkv_device::kernels::{HEADERS, SOURCE, UNIT};
use pdkv_device::nvrtc::{Cache, Key, OPTIONS, Unit};

use crate::standin::{ALONE, IMAGE, whole};

/// A folder, removed with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("pdkv-find-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    /// An NVRTC of this release whose every image is this text.
    fn compiler(&self, name: &str, major: u32, image: &str) -> PathBuf {
        let (source, library) = (self.0.join(format!("{name}.c")), self.0.join(format!("{name}.so")));
        let text = format!(
            r#"#include <string.h>
static const char image[] = "{image}";
int nvrtcVersion(int *a, int *b) {{ *a = {major}; *b = 4; return 0; }}
const char *nvrtcGetErrorString(int s) {{ return "text"; }}
int nvrtcGetNumSupportedArchs(int *n) {{ *n = 2; return 0; }}
int nvrtcGetSupportedArchs(int *a) {{ a[0] = 80; a[1] = 90; return 0; }}
int nvrtcCreateProgram(void **p, const char *s, const char *n, int c, const char *const *h, const char *const *i) {{ *p = 0; return 0; }}
int nvrtcDestroyProgram(void **p) {{ return 0; }}
int nvrtcCompileProgram(void *p, int n, const char *const *o) {{ return strcmp(o[0], "--gpu-architecture=sm_90") ? 5 : 0; }}
int nvrtcGetProgramLogSize(void *p, unsigned long *n) {{ *n = 1; return 0; }}
int nvrtcGetProgramLog(void *p, char *t) {{ *t = 0; return 0; }}
int nvrtcGetCUBINSize(void *p, unsigned long *n) {{ *n = sizeof image - 1; return 0; }}
int nvrtcGetCUBIN(void *p, char *t) {{ memcpy(t, image, sizeof image - 1); return 0; }}
int nvrtcGetPTXSize(void *p, unsigned long *n) {{ return 5; }}
int nvrtcGetPTX(void *p, char *t) {{ return 5; }}
"#
        );
        fs::write(&source, text).unwrap();
        let made = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status();
        assert!(made.unwrap().success());
        library
    }

    fn cache(&self) -> Cache {
        Cache::open(&self.0.join("kept")).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn sources(cache: Result<Cache, String>, compilers: &[&Path]) -> Sources {
    Sources {
        named: None,
        embedded: &[],
        cache,
        compilers: compilers.iter().map(|&path| path.to_owned()).collect(),
    }
}

/// Stands in for the device of the tests that need one; `None` where there is no compiler for it.
fn context() -> Option<Context> {
    let (driver, _) = whole()?;
    Some(driver.device(0).unwrap().context().unwrap())
}

const GOOD: &str = "\\177ELFstand-in....";

#[test]
fn a_named_image_is_taken_or_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(context) = context() else {
        return;
    };
    let scratch = Scratch::new("named");
    let (good, bad) = (scratch.0.join("good"), scratch.0.join("bad"));
    fs::write(&good, IMAGE).unwrap();
    fs::write(&bad, b"\x7fELF of something else").unwrap();
    let compiler = scratch.compiler("compiler", 12, GOOD);
    let load = |path: &Path| {
        let sources = Sources {
            named: Some(path.to_owned()),
            ..sources(Ok(scratch.cache()), &[&compiler])
        };
        sources.load(&context)
    };
    assert_eq!(load(&good).unwrap().origin(), &Origin::Named(good.clone()));
    let error = load(&bad).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.message().contains("`PDKV_CUDA_IMAGE` names"), "{error}");
    assert!(error.message().contains("`cuModuleLoadData` returned `200`"), "{error}");
    let error = load(&scratch.0.join("absent")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert_eq!(scratch.cache().stock().images, 0, "nothing else was tried");
}

#[test]
fn the_packages_own_image_comes_before_the_disk_and_the_compiler() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(context) = context() else {
        return;
    };
    let scratch = Scratch::new("embedded");
    let compiler = scratch.compiler("compiler", 12, GOOD);
    let own = Sources {
        embedded: &[(80, b"unfit"), (90, IMAGE), (100, b"unfit")],
        ..sources(Ok(scratch.cache()), &[&compiler])
    };
    assert_eq!(own.load(&context).unwrap().origin(), &Origin::Embedded(90));
    assert_eq!(scratch.cache().stock().images, 0);
    // One that the driver does not take is passed over.
    let unfit = Sources {
        embedded: &[(90, b"\x7fELF but of another kind")],
        ..own.clone()
    };
    assert!(matches!(
        unfit.load(&context).unwrap().origin(),
        Origin::Compiled { .. }
    ));
}

#[test]
fn what_was_compiled_is_kept_and_serves_without_a_compiler() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(context) = context() else {
        return;
    };
    let scratch = Scratch::new("kept");
    let (newer, compiler) = (
        scratch.compiler("newer", 99, GOOD),
        scratch.compiler("compiler", 12, GOOD),
    );
    let all = sources(Ok(scratch.cache()), &[&newer, &compiler]);
    let first = all.load(&context).unwrap();
    let expected = Origin::Compiled {
        nvrtc: compiler.clone(),
        version: (12, 4),
        not_kept: None,
    };
    assert_eq!(first.origin(), &expected, "the driver speaks CUDA 12.4");
    let without = sources(Ok(scratch.cache()), &[]);
    let second = without.load(&context).unwrap();
    let Origin::Kept(path) = second.origin() else {
        panic!("{:?}", second.origin());
    };
    assert!(path.starts_with(scratch.cache().folder()));
    // An entry that is damaged, or that this driver does not take, is made anew.
    fs::write(path, b"cut").unwrap();
    assert_eq!(all.load(&context).unwrap().origin(), &expected);
    assert!(matches!(without.load(&context).unwrap().origin(), Origin::Kept(_)));
    // Without a folder each process compiles, and says why.
    let nowhere = sources(Err("no home".to_owned()), &[&compiler]);
    let third = nowhere.load(&context).unwrap();
    let Origin::Compiled { not_kept, .. } = third.origin() else {
        panic!("{:?}", third.origin());
    };
    assert_eq!(not_kept.as_deref(), Some("no home"));
    assert!(
        third.origin().to_string().ends_with("CUDA 12.4, not kept: no home"),
        "{}",
        third.origin()
    );
}

#[test]
fn an_image_that_the_driver_does_not_take_is_not_kept() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(context) = context() else {
        return;
    };
    let scratch = Scratch::new("refused");
    let bad = scratch.compiler("bad", 12, "\\177ELFof another kind");
    let error = sources(Ok(scratch.cache()), &[&bad]).load(&context).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    for part in [
        "no kernels for this device",
        "the package holds no image",
        "`cuModuleLoadData` returned `200`",
    ] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    assert_eq!(scratch.cache().stock().images, 0);
}

#[test]
fn a_kept_image_that_the_driver_does_not_take_goes() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(context) = context() else {
        return;
    };
    let scratch = Scratch::new("outdated");
    let cache = scratch.cache();
    let unit = Unit {
        name: UNIT,
        source: SOURCE,
        headers: HEADERS,
    };
    let key = Key::of(&unit, (9, 0), OPTIONS);
    cache.store(&key, b"\x7fELF for a newer driver").unwrap();
    let good = scratch.compiler("good", 12, GOOD);
    let kernels = sources(Ok(scratch.cache()), &[&good]).load(&context).unwrap();
    assert!(matches!(kernels.origin(), Origin::Compiled { not_kept: None, .. }));
    assert_eq!(cache.load(&key).as_deref(), Some(IMAGE));
}
