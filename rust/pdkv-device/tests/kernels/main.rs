//! The kernels, compiled for the host, against the planner's own walk and against the plain-Rust twin.

#![allow(clippy::print_stdout, reason = "a test says what it skipped")]

mod bulk;
#[path = "../../../pdkv-core/tests/geometry/caches.rs"]
#[expect(dead_code, reason = "shared with the planner's tests, which use all of it")]
mod caches;
mod cases;
mod memory;
mod packed;
mod parts;
mod plans;
mod spans;
mod twin;

use pdkv_device::kernels::Entry;

#[test]
fn the_twin_has_every_kernel() {
    let Some(program) = twin::compile(twin::Build::Plain) else {
        return;
    };
    let mut names: Vec<_> = Entry::all(9).into_iter().map(Entry::name).collect();
    let mut found = twin::entries(program);
    names.sort();
    found.sort();
    assert_eq!(found, names);
}
