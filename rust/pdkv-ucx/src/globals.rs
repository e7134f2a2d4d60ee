//! What is set for a whole copy of UCX, right after it was loaded and before it looks for its modules.
//!
//! Also for a copy that somebody else in the process has, so it may only be what no owner can want otherwise.

use std::path::Path;

use crate::abi::Ucs;
use crate::settings::{Setting, Source};

/// The copy in the NIXL wheel loads its EFA module wherever the system has `libefa`. That brings in a second
/// libnl, and the process dies of the two at exit. Without an EFA adapter the module is no loss.
pub(crate) fn without_efa(ucs: &Ucs, libucp: &Path) -> Option<Setting> {
    let modules = libucp.parent()?.join("ucx/libuct_ib_efa.so.0.0.0");
    if !modules.exists() || has_efa() || std::env::var_os("UCX_MODULES").is_some() {
        return None;
    }
    let set = ucs.ucs_global_opts_set_value?;
    // SAFETY: two C strings that live through the call.
    let status = unsafe { set(c"MODULES".as_ptr(), c"^efa".as_ptr()) };
    (status == 0).then(|| Setting {
        name: "MODULES".to_owned(),
        value: "^efa".to_owned(),
        source: Source::Ours,
    })
}

/// Whether an adapter of the `efa` driver is here.
pub(crate) fn has_efa() -> bool {
    let Ok(devices) = std::fs::read_dir("/sys/class/infiniband") else {
        return false;
    };
    devices
        .flatten()
        .filter_map(|device| std::fs::read_link(device.path().join("device/driver")).ok())
        .any(|driver| driver.file_name().is_some_and(|name| name == "efa"))
}
