//! Regions of bytes at made-up addresses.

use pdkv_device::kernels::reference;

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Base address and bytes.
    pub(crate) regions: Vec<(u64, Vec<u8>)>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<_> = self.regions.iter().map(|(base, bytes)| (base, bytes.len())).collect();
        write!(f, "Memory({sizes:x?})")
    }
}

impl Memory {
    /// Regions of these sizes, sources filled with bytes that say where they are from, destinations with `0xEE`.
    pub(crate) fn new(src: &[u64], dst: &[u64]) -> Self {
        let source = src.iter().enumerate().map(|(region, &bytes)| {
            let byte = |at: u64| ((at.wrapping_mul(2_654_435_761) >> 13) as u8) ^ (region as u8).wrapping_mul(37);
            (0..bytes).map(byte).collect()
        });
        let target = dst.iter().map(|&bytes| vec![0xEE; bytes as usize]);
        let regions = (1_u64..).map(|number| number << 44).zip(source.chain(target)).collect();
        Self { regions }
    }

    /// Where the regions of both sides are.
    pub(crate) fn bases(&self, sources: usize) -> (Vec<u64>, Vec<u64>) {
        let bases: Vec<u64> = self.regions.iter().map(|(base, _)| *base).collect();
        (bases[..sources].to_vec(), bases[sources..].to_vec())
    }

    fn find(&self, address: u64) -> (usize, usize) {
        let region = self.regions.iter().rposition(|(base, _)| *base <= address).unwrap();
        (region, (address - self.regions[region].0) as usize)
    }
}

impl reference::Memory for Memory {
    fn read(&self, address: u64, bytes: &mut [u8]) {
        let (region, at) = self.find(address);
        bytes.copy_from_slice(&self.regions[region].1[at..at + bytes.len()]);
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        let (region, at) = self.find(address);
        self.regions[region].1[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
