//! The bytes of a received tensor: memory of this process that belongs to whoever holds it.

use std::fmt;

use pdkv_core::Result;

use super::landing::Lease;

/// Where a small tensor begins; more than any element needs.
const ALIGN: usize = 64;

/// The bytes of one tensor, dense and row-major. Dropping it gives them back.
pub struct PipeBuffer(Kind);

enum Kind {
    Small(Small),
    Landed(Lease),
}

/// Bytes that came inside the stream.
struct Small {
    bytes: Vec<u8>,
    address: u64,
    len: u64,
}

impl PipeBuffer {
    pub(super) fn small(payload: &[u8]) -> Self {
        let mut bytes: Vec<u8> = Vec::with_capacity(payload.len() + ALIGN);
        let start = bytes.as_ptr().align_offset(ALIGN).min(ALIGN);
        bytes.resize(start, 0);
        bytes.extend_from_slice(payload);
        let address = bytes.as_mut_ptr().wrapping_add(start).expose_provenance() as u64;
        Self(Kind::Small(Small {
            bytes,
            address,
            len: payload.len() as u64,
        }))
    }

    pub(super) fn landed(lease: Lease) -> Self {
        Self(Kind::Landed(lease))
    }

    /// The address of the first byte in this process, valid as long as this lives.
    pub fn address(&self) -> u64 {
        match &self.0 {
            Kind::Small(small) => small.address,
            Kind::Landed(lease) => lease.memory().address(),
        }
    }

    /// The number of bytes.
    pub fn len(&self) -> u64 {
        match &self.0 {
            Kind::Small(small) => small.len,
            Kind::Landed(lease) => lease.len(),
        }
    }

    /// Whether the tensor has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the bytes out.
    ///
    /// # Errors
    /// `Region` when they can't be read, which would be a bug.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        match &self.0 {
            Kind::Small(small) => Ok(small.bytes[small.bytes.len() - small.len as usize..].to_vec()),
            Kind::Landed(lease) => {
                let mut bytes = vec![0; lease.len() as usize];
                lease.memory().read_at(0, &mut bytes)?;
                Ok(bytes)
            }
        }
    }
}

impl fmt::Debug for PipeBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PipeBuffer({} bytes)", self.len())
    }
}
