//! The comparison with `cuda.h`: a program compiled against it says what each function takes, and the value of each constant.
//!
//! Headers are looked for beside the copies of NVRTC that `PDKV_TEST_NVRTC` names, as their wheels lie.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it compared")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::abi::{Functions, LAYOUTS};
use super::batch::{BatchOf12, BatchOf13};
use super::numbers::NUMBERS;

fn includes() -> Vec<PathBuf> {
    let named = std::env::var("PDKV_TEST_NVRTC").unwrap_or_default();
    named
        .split(':')
        .filter_map(|path| Some(Path::new(path).parent()?.parent()?.to_owned()))
        .flat_map(|folder| [folder.join("include"), folder.join("../cuda_runtime/include")])
        .filter(|folder| folder.join("cuda.h").exists())
        .collect()
}

#[test]
fn every_function_and_constant_is_as_in_the_header() {
    let includes = includes();
    if includes.is_empty() {
        assert!(
            std::env::var_os("PDKV_NVRTC_REQUIRED").is_none(),
            "no `cuda.h` beside the NVRTC of PDKV_TEST_NVRTC, and PDKV_NVRTC_REQUIRED is set"
        );
        println!("skipped: no `cuda.h` beside the NVRTC of PDKV_TEST_NVRTC");
    }
    for (number, include) in includes.iter().enumerate() {
        let mut body = String::new();
        let mut expected = Vec::new();
        for (name, arguments) in Functions::signatures() {
            writeln!(body, "tell<decltype(&{name})>::about(\"{name}\");").unwrap();
            let mut line = name.to_owned();
            for (size, pointer) in arguments {
                write!(line, " {size}{}", if pointer { "p" } else { "" }).unwrap();
            }
            expected.push(line);
        }
        let batch = expected.len();
        expected.push(String::new());
        // The batched copy has two forms: the header's release says which.
        writeln!(
            body,
            "tell<decltype(&cuMemcpyBatchAsync)>::about(CUDA_VERSION >= 13000 ? \"batch of 13\" : \"batch of 12\");"
        )
        .unwrap();
        for (name, value) in NUMBERS.iter().chain(LAYOUTS) {
            writeln!(body, "std::printf(\"%s %lld\\n\", \"{name}\", (long long)({name}));").unwrap();
            expected.push(format!("{name} {value}"));
        }
        let found = run(include, &body, number);
        let of_13 = found.iter().any(|line| line.starts_with("batch of 13"));
        expected[batch] = if of_13 {
            format!("batch of 13{}", arguments_of::<BatchOf13>())
        } else {
            format!("batch of 12{}", arguments_of::<BatchOf12>())
        };
        let wrong: Vec<_> = expected
            .iter()
            .zip(&found)
            .filter(|(ours, theirs)| ours != theirs)
            .collect();
        assert!(
            wrong.is_empty(),
            "{}: ours, then the header's: {wrong:#?}",
            include.display()
        );
        assert_eq!(found.len(), expected.len());
        println!("{}: {} lines compared", include.display(), found.len());
    }
}

/// The arguments of a function's type in the words of the comparison, from its name: pointers, and sizes.
fn arguments_of<F>() -> String {
    let name = std::any::type_name::<F>();
    let inside = name.split_once('(').unwrap().1.rsplit_once(')').unwrap().0;
    let word = |argument: &str| match argument {
        pointer if pointer.starts_with('*') => " 8p",
        "usize" => " 8",
        other => panic!("`{other}` is not expected"),
    };
    inside.split(", ").map(word).collect()
}

fn run(include: &Path, body: &str, number: usize) -> Vec<String> {
    let scratch = std::env::temp_dir().join(format!("pdkv-cuda-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let text = format!(
        "#include <cstddef>\n#include <cstdio>\n#include <type_traits>\n#include <cuda.h>\n\
         template <class F> struct tell;\n\
         template <class... A> struct tell<CUresult (*)(A...)> {{\n\
         static void about(const char *name) {{\n\
         std::printf(\"%s\", name);\n\
         ((std::printf(\" %zu%s\", sizeof(A), std::is_pointer<A>::value ? \"p\" : \"\")), ...);\n\
         std::printf(\"\\n\"); }} }};\n\
         int main() {{\n{body}}}\n"
    );
    let (source, program) = (scratch.join("probe.cpp"), scratch.join("probe"));
    std::fs::write(&source, text).unwrap();
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-w", "-I"])
        .args([include, Path::new("-o"), &program, &source])
        .output()
        .expect("a C++ compiler is needed to compare with C");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&scratch).unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}
