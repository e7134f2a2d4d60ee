//! What to compile for, given the device and what the compiler knows.

use pdkv_core::{Error, ErrorKind, Result};

/// The kind of image, and the architecture, as in `90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Machine code, for one architecture and the later ones of its major number.
    Cubin(u32),
    /// Code that a driver compiles, for this architecture and all later ones.
    Ptx(u32),
}

impl Target {
    /// The best image for a device of this compute capability: machine code, or what the driver can make it of where the compiler is
    /// older than the device.
    ///
    /// # Errors
    /// `Unsupported` when the device is older than all that the compiler knows.
    pub fn for_device(capability: (u32, u32), archs: &[u32]) -> Result<Self> {
        let arch = capability.0 * 10 + capability.1;
        let known = archs.iter().copied().filter(|&known| known <= arch).max();
        match known {
            // Machine code holds within a major number only.
            Some(known) if known / 10 == capability.0 => Ok(Self::Cubin(known)),
            Some(known) => Ok(Self::Ptx(known)),
            None => Err(Error::new(
                ErrorKind::Unsupported,
                "compile kernels",
                format!("this NVRTC compiles for `{archs:?}`, the device is `{arch}`"),
            )),
        }
    }

    pub(super) fn option(self) -> String {
        match self {
            Self::Cubin(arch) => format!("--gpu-architecture=sm_{arch}"),
            Self::Ptx(arch) => format!("--gpu-architecture=compute_{arch}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_where_it_holds() {
        let archs = [75, 80, 86, 90, 100, 120];
        let target = |capability| Target::for_device(capability, &archs);
        assert_eq!(target((9, 0)).unwrap(), Target::Cubin(90));
        assert_eq!(target((8, 9)).unwrap(), Target::Cubin(86));
        assert_eq!(target((10, 3)).unwrap(), Target::Cubin(100));
        assert_eq!(target((11, 0)).unwrap(), Target::Ptx(100));
        assert_eq!(target((13, 0)).unwrap(), Target::Ptx(120));
        let error = target((7, 0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("`70`"), "{error}");
    }
}
