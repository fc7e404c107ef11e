class Collapsed: pass
