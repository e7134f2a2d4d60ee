//! The kernels through NVRTC: they compile for every architecture meant, cost what the table says, and are kept on disk.
//!
//! Which copies of NVRTC are tried says `PDKV_TEST_NVRTC` (`PATH:PATH`), which `make` fills in.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it compared")]

mod cubin;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use pdkv_core::ErrorKind;
use pdkv_device::kernels::{EMBEDDED, Entry, HEADERS, SOURCE, UNIT};
use pdkv_device::nvrtc::{Figures, Nvrtc, OPTIONS, Target, Unit, figures};

const ARCHS: [u32; 3] = [80, 90, 100];
/// Registers of a multiprocessor, on all of them.
const REGISTERS: u32 = 65_536;

fn copies() -> Vec<Nvrtc> {
    let named = std::env::var("PDKV_TEST_NVRTC").unwrap_or_default();
    let copies: Vec<_> = named
        .split(':')
        .filter(|path| !path.is_empty())
        .map(|path| Nvrtc::open(Path::new(path)).unwrap())
        .collect();
    if copies.is_empty() {
        assert!(
            std::env::var_os("PDKV_NVRTC_REQUIRED").is_none(),
            "PDKV_TEST_NVRTC names no NVRTC, and PDKV_NVRTC_REQUIRED is set"
        );
        println!("skipped: PDKV_TEST_NVRTC names no NVRTC");
    }
    copies
}

fn unit() -> Unit<'static> {
    Unit {
        name: UNIT,
        source: SOURCE,
        headers: HEADERS,
    }
}

fn small() -> Unit<'static> {
    Unit {
        name: "small.cu",
        source: "#include \"n.cuh\"\nextern \"C\" __global__ void small(int *to) { *to = N; }",
        headers: &[("n.cuh", "#define N 7\n")],
    }
}

#[test]
fn every_kernel_compiles_fits_and_costs_what_the_table_says() {
    let mut found = BTreeMap::new();
    for nvrtc in copies() {
        for arch in ARCHS {
            let (major, minor) = nvrtc.version();
            let compiled = nvrtc.compile(&unit(), Target::Cubin(arch), OPTIONS).unwrap();
            assert_eq!(cubin::arch_of(&compiled.image), arch);
            let figures = figures(&compiled.log);
            let mut expected: Vec<_> = Entry::all(arch / 10).into_iter().map(Entry::name).collect();
            expected.sort();
            let names: Vec<_> = figures.iter().map(|kernel| kernel.name.clone()).collect();
            assert_eq!(names, expected, "{}", compiled.log);
            assert_eq!(cubin::code_of(&compiled.image), expected);
            for entry in Entry::all(arch / 10) {
                fits(
                    entry,
                    figures.iter().find(|kernel| kernel.name == entry.name()).unwrap(),
                );
            }
            found.insert((major, minor, arch), figures);
        }
    }
    if found.is_empty() {
        return;
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cuda/figures.md");
    if std::env::var_os("PDKV_WRITE_FIGURES").is_some() {
        std::fs::write(&page, table(&found)).unwrap();
    }
    let text = std::fs::read_to_string(&page).unwrap();
    let releases = columns(&text);
    let here: Vec<_> = found.keys().map(column).collect();
    // Another compiler, other registers: the table is about the two that the development environment pins.
    if here == releases {
        assert_eq!(
            text,
            table(&found),
            "run `make kernel-figures` and look at what changed"
        );
    } else {
        assert!(
            std::env::var_os("PDKV_NVRTC_REQUIRED").is_none(),
            "the table has {releases:?}, here are {here:?}"
        );
        println!("not compared with the table: it has {releases:?}, here are {here:?}");
    }
}

/// As many blocks as the launch counts on find room, and no register is spilled.
fn fits(entry: Entry, figures: &Figures) {
    let name = &figures.name;
    let spilled = figures.spill_store_bytes + figures.spill_load_bytes;
    assert_eq!((figures.stack_bytes, spilled), (0, 0), "{name} spills");
    // Registers are given to a warp in units of 256.
    let warp = (figures.registers * 32).next_multiple_of(256);
    let blocks = REGISTERS / (warp * entry.block() / 32);
    assert!(
        blocks >= entry.resident(),
        "{name} has {} registers: {blocks} blocks fit, not {}",
        figures.registers,
        entry.resident()
    );
}

/// A release of NVRTC and an architecture.
type Column = (u32, u32, u32);

fn column((major, minor, arch): &Column) -> String {
    format!("{major}.{minor} sm_{arch}")
}

/// What a kernel costs beside registers, in bytes.
const BYTES: [&str; 4] = ["stack", "spill stores", "spill loads", "static shared"];

fn bytes(kernel: &Figures) -> [u32; BYTES.len()] {
    [
        kernel.stack_bytes,
        kernel.spill_store_bytes,
        kernel.spill_load_bytes,
        kernel.shared_bytes,
    ]
}

fn table(found: &BTreeMap<Column, Vec<Figures>>) -> String {
    let mut text = String::from(
        "# What the kernels cost\n\n\
         Registers of a thread, by release of NVRTC and architecture; then bytes, the most of any of these: a thread's stack frame, what it stores and\n\
         loads for want of registers, and a block's static shared memory. A stack frame or a spill fails the test that compares this page;\n\
         `make kernel-figures` writes it. What nvcc of the newer release makes ahead of time takes the same registers, or a test of the build script fails.\n\n",
    );
    let titles: Vec<_> = found.keys().map(column).chain(BYTES.map(str::to_owned)).collect();
    writeln!(text, "| kernel | {} |", titles.join(" | ")).unwrap();
    writeln!(text, "|---|{}", "---:|".repeat(titles.len())).unwrap();
    for entry in Entry::all(9) {
        let name = entry.name();
        let costs: Vec<_> = found
            .values()
            .map(|kernels| kernels.iter().find(|kernel| kernel.name == name))
            .collect();
        let registers = costs
            .iter()
            .map(|cost| cost.map_or_else(|| "none".to_owned(), |kernel| kernel.registers.to_string()));
        let mut most = [0; BYTES.len()];
        for cost in costs.iter().flatten() {
            most = std::array::from_fn(|at| most[at].max(bytes(cost)[at]));
        }
        let cells: Vec<_> = registers.chain(most.map(|bytes| bytes.to_string())).collect();
        writeln!(text, "| `{name}` | {} |", cells.join(" | ")).unwrap();
    }
    text
}

fn columns(page: &str) -> Vec<String> {
    let head = page
        .lines()
        .find(|line| line.starts_with("| kernel"))
        .unwrap_or_default();
    head.split('|')
        .map(|cell| cell.trim().to_owned())
        .filter(|cell| cell.contains("sm_"))
        .collect()
}

#[test]
fn images_made_ahead_are_there_where_the_build_was_asked_for_them() {
    let asked = option_env!("PDKV_CUDA_AOT") == Some("1");
    let archs: Vec<_> = EMBEDDED.iter().map(|(arch, _)| *arch).collect();
    assert_eq!(archs, if asked { ARCHS.to_vec() } else { Vec::new() });
    for (arch, image) in EMBEDDED {
        let mut expected: Vec<_> = Entry::all(arch / 10).into_iter().map(Entry::name).collect();
        expected.sort();
        assert_eq!((cubin::arch_of(image), cubin::code_of(image)), (*arch, expected));
    }
}

#[test]
fn what_does_not_compile_says_why() {
    for nvrtc in copies() {
        let broken = Unit {
            source: "extern \"C\" __global__ void broken() { nonsense; }",
            ..small()
        };
        let error = nvrtc.compile(&broken, Target::Cubin(90), &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
        assert!(error.message().contains("nvrtcCompileProgram"), "{error}");
        assert!(format!("{error:?}").contains("nonsense"), "{error:?}");
        let ptx = nvrtc.compile(&small(), Target::Ptx(80), &[]).unwrap();
        assert!(String::from_utf8_lossy(&ptx.image).contains(".target sm_80"));
    }
}

#[test]
fn absent_incomplete_and_old_are_values() {
    let error = Nvrtc::open(Path::new("/nowhere/libnvrtc.so.12")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let folder = std::env::temp_dir().join(format!("pdkv-old-nvrtc-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let library = |name: &str, text: &str| -> PathBuf {
        let (source, path) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
        std::fs::write(&source, text).unwrap();
        let made = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&path, &source])
            .status()
            .unwrap();
        assert!(made.success());
        path
    };
    let version = |major: u32| format!("int nvrtcVersion(int *a, int *b) {{ *a = {major}; *b = 8; return 0; }}\n");
    let mut whole = String::new();
    for name in [
        "nvrtcGetNumSupportedArchs",
        "nvrtcGetSupportedArchs",
        "nvrtcCreateProgram",
        "nvrtcDestroyProgram",
        "nvrtcCompileProgram",
        "nvrtcGetProgramLogSize",
        "nvrtcGetProgramLog",
        "nvrtcGetCUBINSize",
        "nvrtcGetCUBIN",
        "nvrtcGetPTXSize",
        "nvrtcGetPTX",
    ] {
        writeln!(whole, "int {name}(void) {{ return 0; }}").unwrap();
    }
    whole += "const char *nvrtcGetErrorString(int s) { return \"text\"; }\n";
    let incomplete = library("incomplete", &version(12));
    let old = library("old", &(version(11) + &whole));
    let new = library("new", &(version(99) + &whole));
    for (path, part) in [
        (&incomplete, "lacks `nvrtcGetErrorString`"),
        (&old, "of CUDA `11.8`, `12.0` or newer"),
    ] {
        let error = Nvrtc::open(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains(part), "{error}");
    }
    assert_eq!(Nvrtc::open(&new).unwrap().version(), (99, 8));
    // What an older driver cannot load is passed over, and every attempt is told.
    match Nvrtc::find(&[incomplete, old, new], Some((12, 4))) {
        Ok(found) => assert!(found.version().0 <= 12, "one of this system's own"),
        Err(error) => {
            for part in [
                "lacks `nvrtcGetErrorString`",
                "`11.8`",
                "of CUDA `99.8`, the driver speaks `12.4`",
                "libnvrtc.so.13",
            ] {
                assert!(error.message().contains(part), "{error}");
            }
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
