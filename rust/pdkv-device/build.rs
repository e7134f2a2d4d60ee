//! Images of the kernels made ahead of time: with `PDKV_CUDA_AOT=1`, nvcc compiles `cuda/` for the architectures below and the images
//! become a part of the crate. Without it there are none, and the device's own are made when they are needed.

#![allow(clippy::print_stdout, reason = "how a build script speaks to cargo")]

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// An image serves the devices of its major number from its minor number on.
const ARCHS: [u32; 3] = [80, 90, 100];
/// Where the kernels are, from the crate's folder.
const SOURCES: &str = "../../cuda";

fn main() -> ExitCode {
    for name in ["PDKV_CUDA_AOT", "NVCC", "PATH", "VIRTUAL_ENV", "PYO3_PYTHON"] {
        // What the search looks at matters only to who asks for images.
        if name == "PDKV_CUDA_AOT" || asked() {
            println!("cargo::rerun-if-env-changed={name}");
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    match images() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            println!("cargo::error=PDKV_CUDA_AOT asks for images of the kernels: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn asked() -> bool {
    env::var("PDKV_CUDA_AOT").is_ok_and(|value| value == "1")
}

/// Writes the table of images that `src/kernels/mod.rs` includes.
fn images() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?);
    let mut table = String::from("&[\n");
    if asked() {
        println!("cargo::rerun-if-changed={SOURCES}");
        let nvcc = nvcc()?;
        for arch in ARCHS {
            let image = format!("pdkv-sm_{arch}.cubin");
            compile(&nvcc, arch, &out.join(&image))?;
            let _ = writeln!(
                table,
                "    ({arch}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{image}\"))),"
            );
        }
    }
    table += "]\n";
    fs::write(out.join("images.rs"), table).map_err(|error| error.to_string())
}

/// The compiler: what `NVCC` names, or the first of the search path's and of the wheel `nvidia-cuda-nvcc` in the environment of the build.
fn nvcc() -> Result<PathBuf, String> {
    if let Some(named) = env::var_os("NVCC").filter(|named| !named.is_empty()) {
        return Ok(PathBuf::from(named));
    }
    let on_path = env::var_os("PATH").unwrap_or_default();
    let environments = [
        env::var_os("VIRTUAL_ENV").map(PathBuf::from),
        env::var_os("PYO3_PYTHON").and_then(|python| Some(Path::new(&python).parent()?.parent()?.to_owned())),
    ];
    env::split_paths(&on_path)
        .chain(environments.into_iter().flatten().flat_map(|folder| wheels(&folder)))
        .map(|folder| folder.join("nvcc"))
        .find(|program| program.is_file())
        .ok_or_else(|| {
            "there is no nvcc in PATH or in the Python environment; name one in NVCC, or install \
             `nvidia-cuda-nvcc`, `nvidia-cuda-crt`, `nvidia-nvvm` and `nvidia-cuda-runtime`"
                .to_owned()
        })
}

/// Where the wheels of an environment put their programs.
fn wheels(environment: &Path) -> Vec<PathBuf> {
    let Ok(pythons) = fs::read_dir(environment.join("lib")) else {
        return Vec::new();
    };
    let mut folders: Vec<_> = pythons
        .flatten()
        .map(|python| python.path().join("site-packages/nvidia/cu13/bin"))
        .filter(|folder| folder.is_dir())
        .collect();
    folders.sort();
    folders
}

fn compile(nvcc: &Path, arch: u32, image: &Path) -> Result<(), String> {
    let output = Command::new(nvcc)
        .args(["-std=c++17", "-cubin", &format!("-arch=sm_{arch}"), "-o"])
        .arg(image)
        .arg(Path::new(SOURCES).join("pdkv.cu"))
        .output()
        .map_err(|error| format!("`{}` does not run: {error}", nvcc.display()))?;
    if output.status.success() {
        return Ok(());
    }
    // Cargo shows one line an error.
    let words = String::from_utf8_lossy(&output.stderr).replace('\n', " | ");
    Err(format!("`{}` fails for sm_{arch}: {words}", nvcc.display()))
}
