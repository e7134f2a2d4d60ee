//! What tells two processes that they may share a host: the kernel's boot and the pid namespace.
//!
//! Equal facts are a reason to try; only a probe of the peer's memory proves anything.

use std::fs;

use rustix::process::getpid;

/// The facts a hello carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// The kernel's random id of this boot; empty when unreadable, which equals nobody's.
    pub boot_id: String,
    /// The inode of the pid namespace; 0 when unreadable.
    pub pid_namespace: u64,
    /// The pid in that namespace.
    pub pid: u32,
}

/// Reads the facts of this process.
pub fn host_facts() -> HostFacts {
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    HostFacts {
        boot_id: fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .unwrap_or_default()
            .trim()
            .to_owned(),
        pid_namespace: namespace
            .to_string_lossy()
            .chars()
            .filter(char::is_ascii_digit)
            .collect::<String>()
            .parse()
            .unwrap_or(0),
        pid: getpid().as_raw_nonzero().get().unsigned_abs(),
    }
}
