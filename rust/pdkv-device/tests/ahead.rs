//! Images made ahead of time: the build script itself, compiled and run as cargo does it, with nvcc and with programs in its place.
//!
//! What it writes is compiled too, by the line that the crate has. `PDKV_TEST_NVCC` names the nvcc, and `make` fills it in.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it compared")]

mod cubin;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use pdkv_device::kernels::{Entry, HEADERS, SOURCE, UNIT};
use pdkv_device::nvrtc::{Nvrtc, OPTIONS, Target, Unit, figures};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const ARCHS: [u32; 3] = [80, 90, 100];

/// An nvcc that says what it was asked, and gives for each architecture what lies beside it, if anything does.
const COMPILER: &str = r#"
out= arch= options=
while [ $# -gt 1 ]; do
  case $1 in
    -std=c++17 | -cubin) options="$options $1" ;;
    -arch=*) arch=${1#-arch=} ;;
    -o) out=$2; shift ;;
    *) echo "unknown option $1" >&2; exit 1 ;;
  esac
  shift
done
[ -s "$1" ] || { echo "no source $1" >&2; exit 1; }
echo "$arch$options $1" >>"$0.asked"
if [ -e "$0.$arch" ]; then cat "$0.$arch" >"$out"; else printf '\177ELF%s' "$arch" >"$out"; fi
"#;

/// In place of an nvcc, itself, asked as the build script asks and for what each kernel costs beside: that, and its warnings, are left beside
/// this program, for each architecture.
fn telling(nvcc: &Path) -> String {
    format!(
        r#"
for word; do case $word in -arch=*) arch=${{word#-arch=}} ;; esac; done
'{}' --ptxas-options=-v "$@" 2>"$0.$arch.log" || {{ cat "$0.$arch.log" >&2; exit 1; }}
"#,
        nvcc.display()
    )
}

/// The nvcc to test with, and its release.
fn nvcc() -> Option<(PathBuf, String)> {
    let Some(path) = std::env::var_os("PDKV_TEST_NVCC").filter(|path| !path.is_empty()) else {
        let required = std::env::var_os("PDKV_NVCC_REQUIRED").is_some();
        assert!(!required, "PDKV_TEST_NVCC names no nvcc, and PDKV_NVCC_REQUIRED is set");
        println!("skipped: PDKV_TEST_NVCC names no nvcc");
        return None;
    };
    // It has the host's compiler take the other half.
    if std::env::var_os("PDKV_CXX_REQUIRED").is_none() && Command::new("c++").arg("--version").output().is_err() {
        println!("skipped: no C++ compiler");
        return None;
    }
    let told = Command::new(&path).arg("--version").output().unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    let (_, release) = told.split_once("release ").unwrap();
    let (release, _) = release.split_once(',').unwrap();
    Some((path.into(), release.to_owned()))
}

/// How many registers each kernel takes, as `cuda/figures.md` has it from NVRTC; empty where it has no such release and architecture.
fn registers(release: &str, arch: u32) -> Vec<(String, u32)> {
    let page = fs::read_to_string(Path::new(CRATE).join("../../cuda/figures.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with('|'));
    let rows: Vec<Vec<_>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
    let column = format!("{release} sm_{arch}");
    let Some(at) = rows[0].iter().position(|cell| *cell == column) else {
        return Vec::new();
    };
    let kernel = |row: &Vec<&str>| Some((row[1].trim_matches('`').to_owned(), row[at].parse().ok()?));
    let mut found: Vec<_> = rows.iter().filter_map(kernel).collect();
    found.sort();
    found
}

/// A fresh folder of this test's.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ahead-{name}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// A program in sh.
fn program(path: &Path, text: &str) -> PathBuf {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // Written by another process: one that is started beside this would hold it open, and then it can't be run.
    let made = Command::new("sh")
        .args(["-c", "printf '#!/bin/sh\n%s' \"$1\" >\"$0\" && chmod 755 \"$0\""])
        .args([path.as_os_str(), OsStr::new(text)])
        .status();
    assert!(made.unwrap().success());
    path.to_owned()
}

fn rustc(source: &Path, to: &Path, out_dir: &Path) {
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let done = Command::new(compiler)
        .args(["--edition=2024", "-o"])
        .args([to, source])
        .env("OUT_DIR", out_dir)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// The build script, as a program.
fn script() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let made = folder("script").join("build-script");
        rustc(&Path::new(CRATE).join("build.rs"), &made, Path::new("/nowhere"));
        made
    })
}

/// Runs the build script with nothing in its environment but this.
fn build(out: &Path, environment: &[(&str, &OsStr)]) -> Output {
    Command::new(script())
        .current_dir(CRATE)
        .env_clear()
        .env("OUT_DIR", out)
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

/// Runs it asked for images, with this for nvcc.
fn build_by(nvcc: &Path, out: &Path) -> Output {
    let path = std::env::var_os("PATH").unwrap(); // what the program calls
    build(
        out,
        &[
            ("PDKV_CUDA_AOT", OsStr::new("1")),
            ("NVCC", nvcc.as_os_str()),
            ("PATH", &path),
        ],
    )
}

/// The images that the crate would have: what the table is when it is compiled in the crate's place.
fn embedded(out: &Path) -> Vec<(u32, Vec<u8>)> {
    let (source, made) = (out.join("crate.rs"), out.join("crate"));
    let text = "const EMBEDDED: &[(u32, &[u8])] = include!(concat!(env!(\"OUT_DIR\"), \"/images.rs\"));\n\
                fn main() { for (arch, image) in EMBEDDED { println!(\"{arch} {image:?}\"); } }\n";
    fs::write(&source, text).unwrap();
    rustc(&source, &made, out);
    let told = Command::new(&made).output().unwrap();
    assert!(told.status.success());
    let bytes = |list: &str| {
        let inside = list.trim_matches(['[', ']']);
        inside.split(", ").map(|byte| byte.parse().unwrap()).collect()
    };
    let lines = String::from_utf8(told.stdout).unwrap();
    let pairs = lines.lines().map(|line| line.split_once(' ').unwrap());
    pairs.map(|(arch, list)| (arch.parse().unwrap(), bytes(list))).collect()
}

/// The one line that cargo is to show as the error.
fn refused(output: &Output) -> String {
    assert!(!output.status.success());
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors: Vec<_> = told
        .lines()
        .filter_map(|line| line.strip_prefix("cargo::error="))
        .collect();
    assert_eq!(errors.len(), 1, "{told}");
    let known = [
        "cargo::error=",
        "cargo::rerun-if-changed=",
        "cargo::rerun-if-env-changed=",
    ];
    for line in told.lines() {
        assert!(
            known.iter().any(|key| line.starts_with(key)),
            "cargo does not show `{line}`"
        );
    }
    errors[0].to_owned()
}

#[test]
fn who_asks_has_an_image_for_each_architecture() {
    let out = folder("asked");
    let nvcc = program(&out.join("nvcc"), COMPILER);
    let done = build_by(&nvcc, &out);
    let told = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{told}");
    for line in [
        "cargo::rerun-if-env-changed=PDKV_CUDA_AOT",
        "cargo::rerun-if-env-changed=NVCC",
        "cargo::rerun-if-changed=../../cuda",
    ] {
        assert!(told.lines().any(|other| other == line), "{told}");
    }
    let expected: Vec<_> = ARCHS
        .map(|arch| (arch, format!("\x7fELFsm_{arch}").into_bytes()))
        .into();
    assert_eq!(embedded(&out), expected);
    let asked = fs::read_to_string(out.join("nvcc.asked")).unwrap();
    let expected: String = ARCHS
        .map(|arch| format!("sm_{arch} -std=c++17 -cubin ../../cuda/pdkv.cu\n"))
        .concat();
    assert_eq!(asked, expected);
}

#[test]
fn what_a_compiler_makes_is_what_the_crate_has() {
    let named = std::env::var("PDKV_TEST_NVRTC").unwrap_or_default();
    let Some(path) = named.split(':').find(|path| !path.is_empty()) else {
        assert!(std::env::var_os("PDKV_NVRTC_REQUIRED").is_none());
        return;
    };
    let (out, nvrtc) = (folder("real"), Nvrtc::open(Path::new(path)).unwrap());
    let nvcc = program(&out.join("nvcc"), COMPILER);
    let unit = Unit {
        name: UNIT,
        source: SOURCE,
        headers: HEADERS,
    };
    // One of them: compiling takes seconds, and tests/nvrtc.rs compiles for all.
    let arch = ARCHS[1];
    let made = nvrtc.compile(&unit, Target::Cubin(arch), OPTIONS).unwrap().image;
    fs::write(out.join(format!("nvcc.sm_{arch}")), &made).unwrap();
    assert!(build_by(&nvcc, &out).status.success());
    let (found, image) = embedded(&out).swap_remove(1);
    assert!((found, &image) == (arch, &made), "the image is another");
    let mut expected: Vec<_> = Entry::all(arch / 10).into_iter().map(Entry::name).collect();
    expected.sort();
    assert_eq!((cubin::arch_of(&image), cubin::code_of(&image)), (arch, expected));
}

#[test]
fn nvcc_makes_an_image_for_each_architecture_of_kernels_that_cost_what_the_table_says() {
    let Some((nvcc, release)) = nvcc() else {
        return;
    };
    let out = folder("nvcc");
    let done = build_by(&program(&out.join("nvcc"), &telling(&nvcc)), &out);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    let images = embedded(&out);
    let archs: Vec<_> = images.iter().map(|(arch, _)| *arch).collect();
    assert_eq!(archs, ARCHS);
    for (arch, image) in images {
        assert_eq!(cubin::arch_of(&image), arch);
        let mut expected: Vec<_> = Entry::all(arch / 10).into_iter().map(Entry::name).collect();
        expected.sort();
        assert_eq!(cubin::code_of(&image), expected, "sm_{arch}");
        let log = fs::read_to_string(out.join(format!("nvcc.sm_{arch}.log"))).unwrap();
        assert!(!log.contains("warning"), "{log}");
        let costs = figures(&log);
        for kernel in &costs {
            let spilled = kernel.spill_store_bytes + kernel.spill_load_bytes;
            assert_eq!((kernel.stack_bytes, spilled), (0, 0), "{} spills", kernel.name);
        }
        let costs: Vec<_> = costs
            .into_iter()
            .map(|kernel| (kernel.name, kernel.registers))
            .collect();
        let known = registers(&release, arch);
        // Another release, other registers: the one that the development environment pins is one of the table's.
        if known.is_empty() {
            let required = std::env::var_os("PDKV_NVCC_REQUIRED").is_some();
            assert!(!required, "the table has no {release} for sm_{arch}");
            println!("not compared with the table: it has no {release} for sm_{arch}");
        } else {
            assert_eq!(costs, known, "sm_{arch}");
        }
    }
}

#[test]
fn who_does_not_ask_has_none_and_no_compiler_runs() {
    let out = folder("plain");
    let nvcc = program(&out.join("nvcc"), COMPILER);
    for environment in [vec![], vec![("PDKV_CUDA_AOT", OsStr::new("0"))]] {
        let environment = [environment, vec![("NVCC", nvcc.as_os_str())]].concat();
        let done = build(&out, &environment);
        let told = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "{told}");
        assert!(!told.contains("NVCC"), "a new NVCC means nothing to it: {told}");
        assert_eq!(embedded(&out), []);
    }
    assert!(!out.join("nvcc.asked").exists());
}

#[test]
fn a_compiler_that_fails_ends_the_build_in_one_line() {
    let out = folder("fails");
    let text = "echo 'pdkv.cu(1): error' >&2; echo 'one error detected' >&2; exit 2\n";
    let error = refused(&build_by(&program(&out.join("nvcc"), text), &out));
    let start = "PDKV_CUDA_AOT asks for images of the kernels: `";
    assert!(error.starts_with(start), "{error}");
    let end = "nvcc` fails for sm_80: pdkv.cu(1): error | one error detected | ";
    assert!(error.ends_with(end), "{error}");
    assert!(
        !out.join("images.rs").exists(),
        "no crate is built without what was asked for"
    );
}

#[test]
fn a_compiler_that_is_not_there_ends_the_build() {
    let out = folder("missing");
    let error = refused(&build_by(&out.join("nvcc"), &out));
    assert!(error.contains("nvcc` does not run: No such file"), "{error}");
    let error = refused(&build(
        &out,
        &[("PDKV_CUDA_AOT", OsStr::new("1")), ("PATH", out.as_os_str())],
    ));
    assert!(error.contains("there is no nvcc in PATH"), "{error}");
    assert!(error.contains("name one in NVCC"), "{error}");
    assert!(!out.join("images.rs").exists());
}

#[test]
fn a_compiler_is_found_in_the_path_and_in_the_environment_of_the_build() {
    let out = folder("found");
    let system = std::env::var_os("PATH").unwrap();
    let environment = out.join("venv");
    let wheel = program(
        &environment.join("lib/python3.12/site-packages/nvidia/cu13/bin/nvcc"),
        COMPILER,
    );
    let python = environment.join("bin/python");
    let asked = |path: &Path| path.with_file_name("nvcc.asked");
    let mut path = std::env::split_paths(&system).collect::<Vec<_>>();
    path.retain(|folder| !folder.join("nvcc").exists());
    let without = std::env::join_paths(&path).unwrap();
    for (name, value) in [("VIRTUAL_ENV", &environment), ("PYO3_PYTHON", &python)] {
        let done = build(
            &out,
            &[
                ("PDKV_CUDA_AOT", OsStr::new("1")),
                ("NVCC", OsStr::new("")),
                ("PATH", &without),
                (name, value.as_os_str()),
            ],
        );
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        fs::remove_file(asked(&wheel)).unwrap();
    }
    let first = program(&out.join("bin/nvcc"), COMPILER);
    path.insert(0, out.join("bin"));
    let done = build(
        &out,
        &[
            ("PDKV_CUDA_AOT", OsStr::new("1")),
            ("PATH", &std::env::join_paths(&path).unwrap()),
            ("VIRTUAL_ENV", environment.as_os_str()),
        ],
    );
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    assert!(asked(&first).exists() && !asked(&wheel).exists());
}
