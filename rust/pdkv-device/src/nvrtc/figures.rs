//! What each kernel costs of a multiprocessor, read from the assembler's report.

/// The cost of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Name of the kernel.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of the stack frame of a thread.
    pub stack_bytes: u32,
    /// Bytes that a thread stores to memory for want of registers.
    pub spill_store_bytes: u32,
    /// Bytes that it loads from there again.
    pub spill_load_bytes: u32,
    /// Static shared memory of a block.
    pub shared_bytes: u32,
}

/// The figures of all kernels in a log that was made with `--ptxas-options=-v`, by name.
pub fn figures(log: &str) -> Vec<Figures> {
    let mut all: Vec<Figures> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            all.push(Figures {
                name: rest.split('\'').next().unwrap_or_default().to_owned(),
                ..Figures::default()
            });
        } else if let Some(current) = all.last_mut() {
            let before = |what: &str| number_before(line, what);
            if let Some(bytes) = before("bytes stack frame") {
                current.stack_bytes = bytes;
                current.spill_store_bytes = before("bytes spill stores").unwrap_or(0);
                current.spill_load_bytes = before("bytes spill loads").unwrap_or(0);
            }
            if let Some((_, rest)) = line.split_once("Used ") {
                current.registers = number_before(rest, "registers").unwrap_or(0);
                current.shared_bytes = number_before(rest, "bytes smem").unwrap_or(0);
            }
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// The number that stands before a word.
fn number_before(line: &str, word: &str) -> Option<u32> {
    let (before, _) = line.split_once(word)?;
    before.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read() {
        let log = "ptxas info    : 4 bytes gmem\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_90'\n\
                   ptxas info    : Function properties for b\n\
                   ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 72 registers, used 1 barriers, 128 bytes smem\n\
                   ptxas info    : Compile time = 52.456 ms\n\
                   ptxas info    : Compiling entry function 'a' for 'sm_90'\n\
                   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 1 barriers, 616 bytes cmem[0]\n";
        let expected = [("a", 32, 0, 0, 0, 0), ("b", 72, 16, 8, 12, 128)];
        let found = figures(log);
        let found: Vec<_> = found
            .iter()
            .map(|it| {
                (
                    it.name.as_str(),
                    it.registers,
                    it.stack_bytes,
                    it.spill_store_bytes,
                    it.spill_load_bytes,
                    it.shared_bytes,
                )
            })
            .collect();
        assert_eq!(found, expected);
    }
}
