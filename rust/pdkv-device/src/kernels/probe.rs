//! The comparison with `cuda/view.cuh`: a program compiled against it says sizes and offsets.

#![allow(clippy::print_stdout, reason = "a test says what it skipped")]

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use super::view::crossings;

#[test]
fn every_size_and_offset_is_as_in_the_header() {
    let scratch = std::env::temp_dir().join(format!("pdkv-view-{}", std::process::id()));
    std::fs::create_dir_all(&scratch).unwrap();
    let mut body = String::new();
    let mut expected = Vec::new();
    for crossing in crossings() {
        let name = crossing.name;
        writeln!(body, "std::printf(\"%zu\\n\", sizeof(pdkv::{name}));").unwrap();
        expected.push((format!("sizeof({name})"), crossing.size));
        for (field, offset, size) in crossing.fields {
            writeln!(body, "std::printf(\"%zu\\n\", offsetof(pdkv::{name}, {field}));").unwrap();
            writeln!(body, "std::printf(\"%zu\\n\", sizeof(pdkv::{name}::{field}));").unwrap();
            expected.push((format!("offset of {name}::{field}"), offset));
            expected.push((format!("size of {name}::{field}"), size));
        }
    }
    let text = format!("#include <cstddef>\n#include <cstdio>\n#include \"view.cuh\"\nint main() {{\n{body}}}\n");
    let (source, program) = (scratch.join("probe.cpp"), scratch.join("probe"));
    std::fs::write(&source, text).unwrap();
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-Wno-pragma-once-outside-header", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cuda"))
        .args([Path::new("-o"), &program, &source])
        .output();
    let compiled = match compiled {
        Ok(output) => output,
        Err(error) => {
            assert!(
                std::env::var_os("PDKV_CXX_REQUIRED").is_none(),
                "no C++ compiler, and PDKV_CXX_REQUIRED is set: {error}"
            );
            println!("skipped: no C++ compiler ({error})");
            return;
        }
    };
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&scratch).unwrap();
    let values: Vec<usize> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    assert_eq!(values.len(), expected.len());
    let wrong: Vec<_> = expected
        .iter()
        .zip(values)
        .filter(|((_, ours), theirs)| ours != theirs)
        .collect();
    assert!(wrong.is_empty(), "ours, then the header's: {wrong:?}");
}
