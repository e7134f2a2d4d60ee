//! `ucx`: lanes over whatever UCX reaches, RDMA above all.

use std::sync::Arc;

use pdkv_core::session::{Established, features};

use super::Link;
use crate::config::TransportKind;
use crate::shared::Shared;

/// Where the kernel lists RDMA devices.
const DEVICES: &str = "/sys/class/infiniband";

/// Makes a lane to the peer, or says why there is none.
pub(crate) fn connect(shared: &Arc<Shared>, established: &Established) -> Result<Arc<dyn Link>, String> {
    if !shared.config.names(TransportKind::Ucx) && !has_devices(DEVICES) {
        return Err("no RDMA device on this host; name `ucx` in `transports` to use it over other lanes".to_owned());
    }
    if established.features & features::UCX == 0 {
        return Err("the peer's release has no lanes".to_owned());
    }
    Err("this release makes no lanes".to_owned())
}

/// Whether a folder of devices has any.
fn has_devices(folder: &str) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_entries_or_none_at_all_has_no_devices() {
        let folder = std::env::temp_dir().join(format!("pdkv-devices-{}", std::process::id()));
        let path = folder.to_str().unwrap();
        assert!(!has_devices(path));
        std::fs::create_dir(&folder).unwrap();
        assert!(!has_devices(path));
        std::fs::create_dir(folder.join("mlx5_0")).unwrap();
        assert!(has_devices(path));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
