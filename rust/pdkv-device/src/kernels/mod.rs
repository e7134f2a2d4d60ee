//! The kernels of `cuda/`: their source, their entry points, what each is launched with, and plain-Rust twins.
//!
//! All of it is decided here from numbers: nothing touches a device, a driver or a compiler, so all of it runs in tests. What is
//! copied are pages of lanes by way of two tables, or spans of any length; what a page means is the caller's business.

mod checksum;
mod entry;
mod job;
mod jobs;
mod launch;
#[cfg(test)]
mod probe;
pub mod reference;
mod spans;
mod view;

pub use checksum::Checksum;
pub use entry::Entry;
pub use job::{Axis, Job, PageTables, Shape, Side};
pub use jobs::Jobs;
pub(crate) use launch::each_of_jobs;
pub use launch::{DeviceFacts, Launch, Wishes, launches, read_backs};
pub use spans::Run;
pub(crate) use spans::runs_of;
pub use view::{FastDiv, Lane, View};

/// The name of the translation unit, for the compiler's messages.
pub const UNIT: &str = "pdkv.cu";

/// The translation unit.
pub const SOURCE: &str = include_str!("../../../../cuda/pdkv.cu");

/// What it includes: names and texts.
pub const HEADERS: &[(&str, &str)] = &[
    ("view.cuh", include_str!("../../../../cuda/view.cuh")),
    ("machine.cuh", include_str!("../../../../cuda/machine.cuh")),
    ("address.cuh", include_str!("../../../../cuda/address.cuh")),
    ("checksum.cuh", include_str!("../../../../cuda/checksum.cuh")),
    ("finish.cuh", include_str!("../../../../cuda/finish.cuh")),
    ("copy.cuh", include_str!("../../../../cuda/copy.cuh")),
    ("bulk.cuh", include_str!("../../../../cuda/bulk.cuh")),
    ("readback.cuh", include_str!("../../../../cuda/readback.cuh")),
];

/// Images that were made when this crate was built, each with its architecture; none unless the build was asked for them.
pub const EMBEDDED: &[(u32, &[u8])] = include!(concat!(env!("OUT_DIR"), "/images.rs"));
